package main

import (
	"slices"
	"testing"

	"waybill/internal/config"
	"waybill/internal/contract"
)

// A reload names the settings that wait for a start, and no other.
func TestListenersDiffer(t *testing.T) {
	contract.Covers(t, "V1")
	with := func(change func(l *config.Listen)) *loadedConfig {
		c := config.Defaults()
		if change != nil {
			change(&c.Listen)
		}
		cfg, err := assemble(c, (&app{}).secretSources())
		if err != nil {
			t.Fatal(err)
		}
		return cfg
	}
	tls := &config.ListenTLS{Certificate: "a", Key: "b"}
	for _, c := range []struct {
		name   string
		before func(l *config.Listen)
		after  func(l *config.Listen)
		want   []string
	}{
		{"nothing", nil, nil, nil},
		{"the same TLS", func(l *config.Listen) { l.ProxyTLS = tls }, func(l *config.Listen) { l.ProxyTLS = &config.ListenTLS{Certificate: "a", Key: "b"} }, nil},
		{"TLS", nil, func(l *config.Listen) { l.ProxyTLS = tls }, []string{"listen.proxy_tls"}},
		{"all", nil, func(l *config.Listen) { l.Proxy, l.SSH, l.Admin, l.Metrics = "a", "b", "c", "d" }, []string{"listen.proxy", "listen.ssh", "listen.admin", "listen.metrics"}},
	} {
		if got := listenersOf(with(c.before)).differ(with(c.after)); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}
