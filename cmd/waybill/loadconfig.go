package main

import (
	"errors"
	"slices"
	"strings"

	"waybill/inject"
	"waybill/inject/sources"
	"waybill/inject/vault"
	"waybill/internal/config"
	"waybill/proxy"
	"waybill/routes"
)

// loadedConfig is a configuration file in the form in which the parts take it.
type loadedConfig struct {
	snapshot      *routes.Snapshot
	credentials   *inject.Store
	callers       []proxy.StaticCaller
	proxyListen   string
	sshListen     string
	metricsListen string
	adminListen   string
	proxyTLS      *config.ListenTLS // nil: plain TCP
	journal       config.Journal
	audit         config.Audit
	approvals     config.Approvals
	presets       map[string]config.PresetUse // by route
	sources       config.Sources              // what was read
}

// loadFile reads a configuration. Its error is config.Errors for mistakes in the file.
// own is the vault that its secrets come from; nil: they count as locked.
func loadFile(path string, own *vault.Vault) (*loadedConfig, []config.Problem, error) {
	cfg, warnings, _, err := loadFileWith(path, sources.Environment{Vault: own})
	return cfg, warnings, err
}

// loadFileWith also tells what was read, on failure, too.
func loadFileWith(path string, env sources.Environment) (*loadedConfig, []config.Problem, config.Sources, error) {
	c, read, err := config.LoadSources(path)
	if err != nil {
		return nil, nil, read, err
	}
	out, err := assemble(c, env)
	if err != nil {
		return nil, nil, read, err
	}
	out.sources = read
	return out, c.Warnings, read, nil
}

// assemble brings a configuration into the form in which the parts take it.
func assemble(c *config.Config, env sources.Environment) (*loadedConfig, error) {
	if err := sources.Build(c.Credentials, env); err != nil {
		return nil, err
	}
	store, err := inject.NewStore(c.Credentials)
	if err != nil {
		return nil, err
	}
	out := &loadedConfig{
		snapshot: c.Snapshot, credentials: store,
		proxyTLS: c.Listen.ProxyTLS, proxyListen: c.Listen.Proxy, sshListen: c.Listen.SSH, metricsListen: c.Listen.Metrics, adminListen: c.Listen.Admin, journal: c.Journal, audit: c.Audit, approvals: c.Approvals, presets: c.Presets,
	}
	for _, caller := range c.Callers {
		static := proxy.StaticCaller{Name: caller.Name, TokenSHA256: caller.TokenSHA256, CertificateSHA256: caller.CertificateSHA256, Subject: caller.Subject}
		if k := caller.Kubernetes; k != nil {
			if static.ServiceAccount, err = proxy.NewServiceAccount(k.JWKS, k.Issuer, k.Audience, k.ServiceAccount); err != nil {
				return nil, fail(exitConfig, "callers: %s: %w", caller.Name, err)
			}
		}
		out.callers = append(out.callers, static)
	}
	return out, nil
}

// loadConfig reads the configuration; its error has an exit code.
func (a *app) loadConfig() (*loadedConfig, error) {
	path := a.configPath()
	cfg, _, _, err := loadFileWith(path, a.secretSources())
	if err != nil {
		return nil, configError(path, err)
	}
	return cfg, nil
}

func (a *app) secretSources() sources.Environment {
	return sources.Environment{Vault: a.vault, Refreshed: a.refreshed}
}

func (a *app) loadSnapshot() (*routes.Snapshot, error) {
	cfg, err := a.loadConfig()
	if err != nil {
		return nil, err
	}
	return cfg.snapshot, nil
}

// configuredAdmin is listen.admin, or "" when there is none or no configuration:
// reading commands do not need a good one.
func (a *app) configuredAdmin() string {
	if a.adminFlag != "" {
		return ""
	}
	cfg, _, err := loadFile(a.configPath(), nil)
	if err != nil {
		return ""
	}
	return cfg.adminListen
}

// configFacts is what a program's environment depends on.
type configFacts struct {
	snapshot            *routes.Snapshot // nil: nothing is known
	tunnel              bool             // default: tunnel
	secretVars          []string         // variables from which secrets are read
	callersAuthenticate bool
	proxyListen         string
	placeholders        map[string]string // of the presets in use
}

func (a *app) loadFacts() (*configFacts, error) {
	cfg, err := a.loadConfig()
	if err != nil {
		return nil, err
	}
	return &configFacts{
		snapshot: cfg.snapshot, tunnel: cfg.snapshot.Default() == routes.Tunnel, secretVars: cfg.credentials.EnvNames(),
		callersAuthenticate: len(cfg.callers) > 0, proxyListen: cfg.proxyListen, placeholders: cfg.presetPlaceholders(),
	}, nil
}

// hide adds the variables of a running proxy: its configuration may be another than ours,
// and what it reads secrets from is nothing for a program either (CONTRACT C2).
func (f *configFacts) hide(st proxyStatus) {
	f.secretVars = slices.Concat(f.secretVars, st.SecretVariables)
}

// routed reports whether a route takes the host.
func (f *configFacts) routed(host string) bool {
	return f.snapshot != nil && slices.ContainsFunc(f.snapshot.Routes(), func(r *routes.Route) bool { return r.TakesHost(host) })
}

// injects reports whether a route that takes the host injects something.
func (f *configFacts) injects(host string) bool {
	return f.snapshot != nil && slices.ContainsFunc(f.snapshot.Routes(), func(r *routes.Route) bool { return len(r.Inject) > 0 && r.TakesHost(host) })
}

// configText is an error of the configuration as one line of a log.
func configText(err error) string {
	var problems config.Errors
	if errors.As(err, &problems) {
		return strings.ReplaceAll(problems.Error(), "\n", " | ")
	}
	return err.Error()
}

// configuredAudit is the audit block, or its zero value when there is no configuration.
func (a *app) configuredAudit() config.Audit {
	cfg, _, err := loadFile(a.configPath(), nil)
	if err != nil {
		return config.Audit{}
	}
	return cfg.audit
}
