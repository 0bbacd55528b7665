//go:build testkit_tag

package main

const tagged = true
