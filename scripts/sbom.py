#!/usr/bin/env python3
"""Writes an SPDX 2.3 SBOM of a Go binary from the build information in it: sbom.py BINARY VERSION EPOCH"""
import datetime
import hashlib
import json
import re
import subprocess
import sys

binary, version, epoch = sys.argv[1], sys.argv[2], int(sys.argv[3])
lines = subprocess.run(["go", "version", "-m", binary], check=True, capture_output=True, text=True).stdout.splitlines()
digest = hashlib.sha256(open(binary, "rb").read()).hexdigest()
packages = [{
    "SPDXID": "SPDXRef-waybill", "name": "waybill", "versionInfo": version, "downloadLocation": "NOASSERTION", "filesAnalyzed": False,
    "licenseDeclared": "Apache-2.0", "checksums": [{"algorithm": "SHA256", "checksumValue": digest}], "primaryPackagePurpose": "APPLICATION",
}]
relations = [{"spdxElementId": "SPDXRef-DOCUMENT", "relationshipType": "DESCRIBES", "relatedSpdxElement": "SPDXRef-waybill"}]
modules = [("stdlib", lines[0].split()[-1])]
changed = set()  # modules of which the source tree has a copy of its own
for f in (line.split("\t") for line in lines):
    if len(f) > 3 and f[1] == "dep":
        modules.append((f[2], f[3]))
    elif len(f) > 2 and f[1] == "=>":
        changed.add(modules[-1])
for path, ver in modules:
    ref = "SPDXRef-" + re.sub(r"[^A-Za-z0-9.-]", "-", f"{path}-{ver}")
    packages.append({
        "SPDXID": ref, "name": path, "versionInfo": ver, "downloadLocation": "NOASSERTION", "filesAnalyzed": False, "primaryPackagePurpose": "LIBRARY",
        "externalRefs": [{"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": f"pkg:golang/{path}@{ver}"}],
    })
    if (path, ver) in changed:
        packages[-1]["comment"] = "with the corrections of the source tree, see internal/third_party"
    relations.append({"spdxElementId": "SPDXRef-waybill", "relationshipType": "DEPENDS_ON", "relatedSpdxElement": ref})
json.dump({
    "spdxVersion": "SPDX-2.3", "dataLicense": "CC0-1.0", "SPDXID": "SPDXRef-DOCUMENT", "name": f"waybill-{version}",
    "documentNamespace": f"https://waybill.example/spdx/{version}/{digest}",
    "creationInfo": {"created": datetime.datetime.fromtimestamp(epoch, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"), "creators": ["Tool: scripts/sbom.py"]},
    "packages": packages, "relationships": relations,
}, sys.stdout, indent=1)
