package main

// placeholder is a variable without which a client library refuses to start. The
// value is recognisable, and useless: the proxy replaces what the library sends.
type placeholder struct {
	name  string
	value string
	host  string // the API it is for
	// always: harmless also where no route injects for host, since nothing else
	// reads the variable. The others also change which login a tool uses, so they
	// are set only for a host that a route injects for.
	always bool
}

const placeholderToken = "waybill-placeholder-not-a-key"

var placeholders = []placeholder{
	{"OPENAI_API_KEY", "sk-" + placeholderToken, "api.openai.com", true},
	{"ANTHROPIC_API_KEY", "sk-ant-" + placeholderToken, "api.anthropic.com", true},
	{"GEMINI_API_KEY", placeholderToken, "generativelanguage.googleapis.com", true},
	{"MISTRAL_API_KEY", placeholderToken, "api.mistral.ai", true},
	{"GROQ_API_KEY", "gsk_" + placeholderToken, "api.groq.com", true},
	{"OPENROUTER_API_KEY", "sk-or-" + placeholderToken, "openrouter.ai", true},
	{"CO_API_KEY", placeholderToken, "api.cohere.com", true},
	{"STRIPE_API_KEY", "sk_test_" + placeholderToken, "api.stripe.com", true},
	{"STRIPE_SECRET_KEY", "sk_test_" + placeholderToken, "api.stripe.com", true},
	{"GOOGLE_API_KEY", placeholderToken, "generativelanguage.googleapis.com", false},
	{"GH_TOKEN", "ghp_" + placeholderToken, "api.github.com", false},
	{"GITHUB_TOKEN", "ghp_" + placeholderToken, "api.github.com", false},
	{"HF_TOKEN", "hf_" + placeholderToken, "huggingface.co", false},
	{"CLOUDFLARE_API_TOKEN", placeholderToken, "api.cloudflare.com", false},
	{"SLACK_BOT_TOKEN", "xoxb-" + placeholderToken, "slack.com", false},
	{"DISCORD_TOKEN", placeholderToken, "discord.com", false},
}

// placeholderValues returns the variables to set. injects reports whether a route
// injects for a host. With tunnel (default: tunnel), hosts without a route are
// reached with the program's own login, which a placeholder would shadow.
func placeholderValues(injects func(host string) bool, tunnel bool) map[string]string {
	values := map[string]string{}
	for _, p := range placeholders {
		if injects(p.host) || p.always && !tunnel {
			values[p.name] = p.value
		}
	}
	return values
}

// withPresets adds the placeholders of the presets in use: their routes inject.
func withPresets(values, presets map[string]string) map[string]string {
	for name, v := range presets {
		if values[name] == "" {
			values[name] = v
		}
	}
	return values
}
