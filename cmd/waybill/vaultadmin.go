package main

import (
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"strings"

	"waybill/inject"
	"waybill/inject/vault"
	"waybill/metrics"
)

const pathVault = "/v1/vault"

// vaultStatus is GET /v1/vault, and the answer to lock and unlock. Problem is set when
// nothing was done; it holds no secret.
type vaultStatus struct {
	Method  string       `json:"method,omitempty"`
	Locked  bool         `json:"locked"`
	Secrets []vault.Item `json:"secrets,omitempty"`
	Problem string       `json:"problem,omitempty"`
}

// unlockRequest is the body of POST /v1/vault/unlock. It travels over a socket that only
// the owner can open.
type unlockRequest struct {
	Passphrase string `json:"passphrase,omitempty"`
	Identity   string `json:"identity,omitempty"` // path of an identity file
}

// vaultAdmin serves the vault of a running proxy on the admin socket. forget drops what
// was made of its secrets.
func vaultAdmin(v *vault.Vault, forget func(), m *metrics.Metrics, log *slog.Logger, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		rest, ours := strings.CutPrefix(r.URL.Path, pathVault)
		if !ours || rest != "" && rest[0] != '/' || !ownHost(r) || r.Header.Get("Origin") != "" {
			next.ServeHTTP(w, r) // refuses what a browser sends
			return
		}
		var err error
		name, secret := strings.CutPrefix(rest, "/secrets/")
		switch {
		case rest == "" && r.Method == http.MethodGet:
		case rest == "/unlock" && r.Method == http.MethodPost:
			var in unlockRequest
			dec := json.NewDecoder(io.LimitReader(r.Body, 64<<10))
			dec.DisallowUnknownFields()
			if dec.Decode(&in) != nil {
				err = errors.New("the request cannot be read")
				break
			}
			err = v.Unlock(in.Passphrase, in.Identity)
			if err == nil {
				forget() // of failures, too: the next request asks
			}
			log.Info("vault unlock", slog.Bool("unlocked", err == nil))
		case rest == "/lock" && r.Method == http.MethodPost:
			v.Lock()
			forget()
			log.Info("vault locked")
		case secret && r.Method == http.MethodPut:
			var value []byte
			if value, err = io.ReadAll(io.LimitReader(r.Body, inject.MaxSecretBytes+1)); err == nil {
				err = storeSecret(v, name, value)
				clear(value)
			}
		case secret && r.Method == http.MethodDelete:
			err = v.Remove(name)
		default:
			next.ServeHTTP(w, r)
			return
		}
		out := vaultStatus{Locked: v.Locked()}
		measureVault(m, v)
		out.Method, _ = v.Method()
		if err == nil && !out.Locked {
			out.Secrets, err = v.List()
		}
		status := http.StatusOK
		if err != nil {
			out.Problem, status = vaultProblem(err), http.StatusUnprocessableEntity
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "no-store")
		w.WriteHeader(status)
		_ = json.NewEncoder(w).Encode(out)
	})
}

// measureVault says whether there is a vault and it is locked.
func measureVault(m *metrics.Metrics, v *vault.Vault) {
	_, err := v.Method()
	m.VaultLocked(err == nil && v.Locked())
}

// vaultProblem is an error of the vault for people. A text of a library stays out.
func vaultProblem(err error) string {
	for _, known := range []error{vault.ErrNone, vault.ErrExists, vault.ErrKey, vault.ErrLocked, vault.ErrNotFound, vault.ErrDamaged, vault.ErrNoKeyring, errBadSecretName} {
		if errors.Is(err, known) {
			return known.Error()
		}
	}
	var bad *inject.Error
	if errors.As(err, &bad) {
		return bad.Error()
	}
	return "vault: its files cannot be used"
}

var errBadSecretName = errors.New("vault: a name has at most 64 letters, digits, dots, hyphens and underscores, and begins with a letter or digit")

// storeSecret checks a value as the proxy will read it, and stores it.
func storeSecret(v *vault.Vault, name string, value []byte) error {
	if !secretName(name) {
		return errBadSecretName
	}
	if _, err := inject.ParseSecret(value); err != nil {
		// Keys and certificates have several lines.
		if _, merr := inject.ParseMaterial(value); merr != nil || !strings.Contains(string(value), "-----BEGIN ") && !strings.HasPrefix(strings.TrimSpace(string(value)), "{") {
			return err
		}
	}
	return v.Set(name, value)
}

func secretName(s string) bool {
	for i := range len(s) {
		c := s[i]
		word := 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9'
		if !word && (i == 0 || c != '.' && c != '-' && c != '_') {
			return false
		}
	}
	return s != "" && len(s) <= 64
}
