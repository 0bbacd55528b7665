//go:build !waybill_controls

package control

// Tags is the build tag of this build, for tests that build another binary: empty
// in a normal build.
const Tags = ""

// Off reports whether the protection with that name is switched off. In this build
// none can be.
func Off(string) bool { return false }
