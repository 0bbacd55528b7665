// Command hello is a program for the tests of testkit.Binary.
package main

import "os"

func main() {
	_, _ = os.Stdout.WriteString("hello\n")
	if tagged {
		_, _ = os.Stdout.WriteString("tagged\n")
	}
}
