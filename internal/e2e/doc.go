// Package e2e holds the tests that need the whole product: the real binary,
// started and killed as a process, real clients on one side and scripted origins
// on the other, whose ledger is the oracle (CONTRACT T2).
package e2e
