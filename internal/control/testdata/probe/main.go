// Command probe is built by a test with and without the tag, to see whether the
// name of a control is in the binary.
package main

import (
	"os"

	"waybill/internal/control"
)

func main() {
	if control.Off("F1-name-in-the-binary") {
		os.Exit(1)
	}
}
