package main

import (
	"encoding/base64"
	"path/filepath"
	"testing"

	"waybill/internal/contract"
)

// TestSSHEndpointCredentials: what a variable holds for one proxy is not sent, in clear, to
// an SSH endpoint on another host (CONTRACT V2); the session of "waybill run" is.
func TestSSHEndpointCredentials(t *testing.T) {
	contract.Covers(t, "V2")
	for name, c := range map[string]struct {
		env                  []string
		flag, fallback       string
		addr, user, password string
	}{
		"nothing":                   {nil, "", "", defaultSSHListen, "", ""},
		"another proxy":             {[]string{"HTTPS_PROXY=http://u:p@proxy.corp.test:3128"}, "", "", defaultSSHListen, "", ""},
		"another proxy, each name":  {[]string{"https_proxy=http://u:p@a.test:1", "HTTP_PROXY=http://u:p@b.test:1", "http_proxy=http://u:p@c.test:1"}, "", "gate.test:7172", "gate.test:7172", "", ""},
		"another proxy, a session":  {[]string{"WAYBILL_SESSION=ses_1", "WAYBILL_SSH=gate.test:7172", "HTTPS_PROXY=http://u:p@proxy.corp.test:3128"}, "", "", "gate.test:7172", "", ""},
		"same host":                 {[]string{"HTTPS_PROXY=http://u:p@Gate.test:7171"}, "gate.test:7172", "", "gate.test:7172", "u", "p"},
		"same address":              {[]string{"HTTPS_PROXY=http://u:p@[::1]:7171"}, "", "[::1]:7172", "[::1]:7172", "u", "p"},
		"env --session":             {[]string{"HTTPS_PROXY=http://ses_1:t@127.0.0.1:7171"}, "", "", defaultSSHListen, "ses_1", "t"},
		"first is another's":        {[]string{"HTTPS_PROXY=http://u:p@proxy.corp.test:3128", "HTTP_PROXY=http://v:q@127.0.0.1:7171"}, "", "", defaultSSHListen, "v", "q"},
		"run":                       {[]string{"WAYBILL_SESSION=ses_1", "WAYBILL_SSH=127.0.0.1:7172", "HTTPS_PROXY=http://ses_1:t@127.0.0.1:7171"}, "", "other.test:1", "127.0.0.1:7172", "ses_1", "t"},
		"run, endpoint elsewhere":   {[]string{"WAYBILL_SESSION=ses_1", "WAYBILL_SSH=10.0.0.7:7172", "HTTPS_PROXY=http://ses_1:t@10.0.0.8:7171"}, "", "", "10.0.0.7:7172", "ses_1", "t"},
		"run, flag names another":   {[]string{"WAYBILL_SESSION=ses_1", "WAYBILL_SSH=127.0.0.1:7172", "HTTPS_PROXY=http://ses_1:t@127.0.0.1:7171"}, "other.test:7172", "", "other.test:7172", "", ""},
		"WAYBILL_SSH":               {[]string{"WAYBILL_SSH=http://x:tok@gate.test:7172", "HTTPS_PROXY=http://u:p@gate.test:7171"}, "", "", "gate.test:7172", "x", "tok"},
		"WAYBILL_SSH, flag another": {[]string{"WAYBILL_SSH=http://x:tok@gate.test:7172"}, "other.test:7172", "", "other.test:7172", "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			a := &app{environ: c.env, configFlag: filepath.Join(dir, "none.yaml"), dataFlag: filepath.Join(dir, "data")}
			want := sshEndpoint{addr: c.addr}
			if c.user != "" {
				want.auth = "Basic " + base64.StdEncoding.EncodeToString([]byte(c.user+":"+c.password))
			}
			if got := a.sshEndpoint(t.Context(), c.flag, c.fallback); got != want {
				t.Errorf("%+v, want %+v", got, want)
			}
		})
	}
}
