package inject

import (
	"encoding/json"
	"slices"
	"time"
)

// Spec says where a secret comes from, as the configuration has it. It holds no secret.
// Exactly one of the pointers and names is set: the one of Kind.
type Spec struct {
	Kind string

	Env         string           `json:",omitzero"`
	File        string           `json:",omitzero"`
	Command     []string         `json:",omitzero"` // the program and its arguments
	Vault       string           `json:",omitzero"` // name in Waybill's own vault
	Kubernetes  *KubernetesSpec  `json:",omitzero"`
	Keyring     *KeyringSpec     `json:",omitzero"`
	Hashicorp   *HashicorpSpec   `json:",omitzero"`
	AWS         *AWSSpec         `json:",omitzero"`
	OnePassword *OnePasswordSpec `json:",omitzero"`
	OAuth       *OAuthSpec       `json:",omitzero"`
	GitHubApp   *GitHubAppSpec   `json:",omitzero"`

	// Timeout bounds one fetch; 0: 10 s.
	Timeout time.Duration `json:",omitzero"`
	// Refresh is how long what was fetched is used; 0: the kind's own default.
	Refresh time.Duration `json:",omitzero"`
}

// The kinds.
const (
	KindEnv         = "env"
	KindFile        = "file"
	KindCommand     = "command"
	KindVault       = "vault"
	KindKubernetes  = "kubernetes"
	KindKeyring     = "keyring"
	KindHashicorp   = "hashicorp_vault"
	KindAWS         = "aws"
	KindOnePassword = "onepassword"
	KindOAuth       = "oauth"
	KindGitHubApp   = "github_app"
)

// KubernetesSpec is a key of a secret that is mounted as a folder.
type KubernetesSpec struct{ Folder, Key string }

// KeyringSpec is an entry of the operating system's keyring.
type KeyringSpec struct{ Service, Account string }

// HashicorpSpec is a secret in HashiCorp Vault or OpenBao.
type HashicorpSpec struct {
	Address   string
	Namespace string
	RootsFile string // PEM; "": the system's
	// Mount and Path name it: of the KV v2 engine, or with Dynamic of any engine that
	// gives leases.
	Mount, Path string
	Field       string // of the answer's data; "": the whole of it, as JSON
	Dynamic     bool
	// Exactly one way to log in.
	Token      *Spec
	AppRole    *AppRoleSpec
	Kubernetes *KubernetesAuthSpec
}

// AppRoleSpec logs in with a role id and a secret id.
type AppRoleSpec struct {
	Mount    string // "": approle
	RoleID   string
	SecretID *Spec
}

// KubernetesAuthSpec logs in with the service account's token.
type KubernetesAuthSpec struct {
	Mount   string // "": kubernetes
	Role    string
	JWTFile string // "": the usual place
}

// AWSSpec is a secret in AWS Secrets Manager. Credentials for it come from the
// environment as for every AWS program.
type AWSSpec struct {
	Secret, Region string
	Field          string // of a JSON secret; "": the whole
	Endpoint       string // "": AWS's own
	Stage          string // "": AWSCURRENT
}

// OnePasswordSpec is a field of an item behind 1Password Connect.
type OnePasswordSpec struct {
	Host, Vault, Item, Field string
	Token                    *Spec
}

// OAuthSpec makes access tokens (RFC 6749 §4.4, §6).
type OAuthSpec struct {
	TokenURL     string
	ClientID     string
	ClientSecret *Spec // nil: a public client
	RefreshToken *Spec // set: the refresh token grant; nil: client credentials
	// Rotates says that the server gives a new refresh token with each access token. It is
	// stored before the access token is used, so RefreshToken can be written to then.
	Rotates   bool
	Scopes    []string
	Audience  string
	InBody    bool // client authentication in the body instead of Basic (RFC 6749 §2.3.1)
	RootsFile string
}

// GitHubAppSpec makes installation tokens of a GitHub App.
type GitHubAppSpec struct {
	AppID          string
	InstallationID string
	PrivateKey     *Spec
	API            string // "": https://api.github.com
	Repositories   []string
	Permissions    map[string]string
	RootsFile      string
}

// Place identifies what the spec names, for the digest of a snapshot and to tell
// whether a definition changed. It is no secret.
func (s *Spec) Place() string {
	switch s.Kind {
	case KindEnv:
		return s.Env
	case KindFile:
		return s.File
	}
	text, err := json.Marshal(s)
	if err != nil {
		panic(err) // names, lists and numbers only
	}
	return string(text)
}

// Inner returns the specs of the secrets that this one needs.
func (s *Spec) Inner() []*Spec {
	var out []*Spec
	add := func(in *Spec) {
		if in != nil {
			out = append(out, in)
		}
	}
	if h := s.Hashicorp; h != nil {
		add(h.Token)
		if h.AppRole != nil {
			add(h.AppRole.SecretID)
		}
	}
	if s.OnePassword != nil {
		add(s.OnePassword.Token)
	}
	if s.OAuth != nil {
		add(s.OAuth.ClientSecret)
		add(s.OAuth.RefreshToken)
	}
	if s.GitHubApp != nil {
		add(s.GitHubApp.PrivateKey)
	}
	return out
}

// NeedsVault reports whether the secret, or one that it is made of, is in Waybill's own vault.
func (s *Spec) NeedsVault() bool {
	return s.Kind == KindVault || slices.ContainsFunc(s.Inner(), (*Spec).NeedsVault)
}

// awsEnv are the variables that the AWS libraries log in with. The id is among them: half
// a pair makes programs fail.
var awsEnv = []string{"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_CONTAINER_AUTHORIZATION_TOKEN"}

// EnvNames returns the environment variables that the spec reads secrets from.
func (s *Spec) EnvNames() []string {
	var out []string
	if s.AWS != nil {
		out = append(out, awsEnv...)
	}
	if s.Env != "" {
		out = append(out, s.Env)
	}
	for _, in := range s.Inner() {
		out = append(out, in.EnvNames()...)
	}
	return out
}
