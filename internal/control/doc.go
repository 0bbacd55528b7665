// Package control lets a test build switch one protection of the product off, to
// show that the tests see it go.
//
// A protection is written
//
//	if !control.Off("F1-durable-before-send") {
//		wait for the commit
//	}
//
// In a normal build Off is the constant false, so the condition and the name
// compile to nothing. With the build tag waybill_controls it reports whether the
// environment variable WAYBILL_CONTROL_OFF lists the name.
//
// Each name has a line in docs/controls.txt, with the tests that must go red
// without the protection. `make controls` (part of `make test`) runs every line:
// with the protection on the tests pass, with it off a test that claims a rule of
// that group fails. The package depends on nothing, so every package may use it.
package control

// Env lists the names of the protections that are off, separated by commas, in a
// build with the tag. It is inherited by child processes; one that is built by a
// test needs the tag too: pass Tags to go build -tags.
const Env = "WAYBILL_CONTROL_OFF"
