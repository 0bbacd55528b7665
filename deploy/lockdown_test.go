package deploy

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"waybill/internal/testkit"
)

// TestLockdown loads the sidecar's rules in a network namespace with a network behind it:
// the proxy's user gets out, the agent's user gets an immediate refusal, and reaches the
// proxy on loopback (docs/kubernetes.md).
func TestLockdown(t *testing.T) {
	if os.Getuid() != 0 {
		t.Fatal("network namespaces need root, as make test has in CI")
	}
	nft, python := testkit.RequireTool(t, "nft"), testkit.RequireTool(t, "python3")
	if _, err := os.Stat("/usr/bin/python3"); err == nil {
		python = "/usr/bin/python3" // not a wrapper that wants to know where it is
	}
	testkit.RequireTool(t, "ip")
	testkit.RequireTool(t, "unshare")
	rules, err := os.ReadFile("helm/waybill/files/lockdown.nft")
	if err != nil {
		t.Fatal(err)
	}
	// The outside is a second namespace at the other end of a veth pair. Everything happens
	// below one unshare, so nothing is left of it.
	const script = `
set -eu
ip link set lo up
mount -t tmpfs none /run; mkdir -p /run/netns; ip netns add outside
ip link add inner type veth peer name outer netns outside
ip addr add 10.77.0.1/24 dev inner; ip link set inner up
ip -n outside addr add 10.77.0.2/24 dev outer; ip -n outside link set outer up
ip route add default via 10.77.0.2
cat >/tmp/server.py <<'PY'
import socket, sys, threading
for host, port in [(sys.argv[1], int(p)) for p in sys.argv[2:]]:
    s = socket.create_server((host, port))
    def serve(s=s):
        while True:
            c, _ = s.accept(); c.sendall(b"hello"); c.close()
    threading.Thread(target=serve, daemon=True).start()
print("up", flush=True)
threading.Event().wait()
PY
cat >/tmp/try.py <<'PY'
import os, socket, sys, time
uid, kind, host, port = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
os.setgid(uid); os.setuid(uid)
start = time.monotonic()
try:
    s = socket.socket(socket.AF_INET, socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM)
    s.settimeout(5)
    s.connect((host, port))
    if kind == "udp":
        s.send(b"x"); s.send(b"x")
    print("reached" if kind == "udp" or s.recv(5) == b"hello" else "empty")
except socket.timeout:
    print("silence")
except OSError:
    print("refused" if time.monotonic() - start < 2 else "late")
PY
ip netns exec outside "$PYTHON" /tmp/server.py 10.77.0.2 443 53 >/tmp/outside & a=$!
"$PYTHON" /tmp/server.py 127.0.0.1 7171 >/tmp/proxy & b=$!
"$PYTHON" /tmp/server.py 10.77.0.1 7174 >/tmp/probe & c=$!
for f in outside:$a proxy:$b probe:$c; do
  while ! grep -q up /tmp/${f%:*}; do kill -0 ${f#*:} || { echo "${f%:*} does not start"; exit 1; }; done
done
try() { "$PYTHON" /tmp/try.py "$@"; }
echo "before agent tcp 443: $(try 1000 tcp 10.77.0.2 443)"
"$NFT" -f /tmp/lockdown.nft
"$NFT" -f /tmp/lockdown.nft
echo "proxy tcp 443: $(try 65532 tcp 10.77.0.2 443)"
echo "agent tcp 443: $(try 1000 tcp 10.77.0.2 443)"
echo "root tcp 443: $(try 0 tcp 10.77.0.2 443)"
echo "agent tcp 53: $(try 1000 tcp 10.77.0.2 53)"
echo "agent udp 443: $(try 1000 udp 10.77.0.2 443)"
echo "agent loopback: $(try 1000 tcp 127.0.0.1 7171)"
echo "kubelet probe: $(ip netns exec outside "$PYTHON" /tmp/try.py 1000 tcp 10.77.0.1 7174)"
`
	dir := t.TempDir()
	if err := os.WriteFile(dir+"/lockdown.nft", rules, 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", "mount --make-rprivate / && mount --bind "+dir+" /tmp && mount -t proc proc /proc && "+script)
	cmd.Dir, cmd.Env = "/", append(os.Environ(), "PYTHON="+python, "NFT="+nft)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	want := []string{
		"before agent tcp 443: reached", "proxy tcp 443: reached", "agent tcp 443: refused", "root tcp 443: refused", "agent tcp 53: refused", "agent udp 443: refused",
		"agent loopback: reached", "kubelet probe: reached",
	}
	for _, line := range want {
		if !strings.Contains(string(out), line+"\n") {
			t.Errorf("want %q\n%s", line, out)
		}
	}
	// The uid of the rules is the image's and the chart's.
	if !strings.Contains(string(rules), fmt.Sprintf("meta skuid %d accept", 65532)) {
		t.Error("the rules let another user out")
	}
}
