//go:build waybill_controls

package control

import (
	"os"
	"slices"
	"strings"
	"sync"
)

// Tags is the build tag of this build, for tests that build another binary.
const Tags = "waybill_controls"

// Off reports whether the protection with that name is switched off. The variable
// is read once, at the first call.
func Off(name string) bool { return name != "" && slices.Contains(names(), name) }

var names = sync.OnceValue(func() []string { return strings.Split(os.Getenv(Env), ",") })
