// Package deps holds the test of who may import whom. It has no code of its own:
// the table is in deps_test.go, and says for every package of the module what it
// may import, so that a new folder or a new dependency is a decision and not an
// accident. `make lint` draws the same arrows with depguard, in the editor.
package deps
