"""Gets each URL with the HTTP clients of Python as they come, and prints how each exchange ended."""
import sys
import urllib.parse
import urllib.request

import httpx
import requests

for url in sys.argv[1:]:
    def say(name, version, status, body):
        print(urllib.parse.urlsplit(url).path + "/" + name, version, status, body)

    with urllib.request.urlopen(url + "/urllib", timeout=20) as r:
        say("urllib", "HTTP/1.1", r.status, r.read().decode())
    r = requests.get(url + "/requests", timeout=20)
    say("requests", "HTTP/1.1", r.status_code, r.text)
    for h2 in (False, True):
        with httpx.Client(http2=h2, timeout=20) as c:
            r = c.get(url + ("/httpx2" if h2 else "/httpx"))
            say("httpx2" if h2 else "httpx", r.http_version, r.status_code, r.text)
