package contract

import (
	"os"
	"testing"
)

// TestContractCoverage holds docs/contract.md, docs/contract-unbuilt.txt and the
// tests together. With ExecutedEnv it reads the claims of the tests that ran, as
// the last step of `make test` does; a missing or empty directory fails. Without it
// - in a plain `go test ./...`, where the packages are separate processes and no
// place to meet is given - it reads the claims from the sources of the tests, which
// finds the same gaps but does not prove that the tests ran.
func TestContractCoverage(t *testing.T) {
	rules, err := Rules()
	if err != nil {
		t.Fatal(err)
	}
	unbuilt, err := Unbuilt()
	if err != nil {
		t.Fatal(err)
	}
	var claims []Claim
	if dir := os.Getenv(ExecutedEnv); dir != "" {
		claims, err = ReadClaims(dir)
	} else {
		t.Logf("%s is not set: claims are read from the sources; `make test` asks for tests that ran", ExecutedEnv)
		claims, err = SourceClaims("../..")
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, problem := range Check(rules, unbuilt, claims) {
		t.Error(problem)
	}
	t.Logf("%d rules, %d not built yet, %d claims", len(rules), len(unbuilt), len(claims))
}
