// Package testkit is what Waybill's tests stand on: scripted HTTP/1.1 and HTTP/2
// origins that keep an independent ledger of what reached them (CONTRACT T2), a
// certificate authority, canary secrets and the search for them (C2), the real
// binary to start and to kill, leak checks, and clients that go through a proxy.
//
// It is imported by tests only, talks to loopback only, and never skips: a
// missing tool fails the test and names the package to install.
//
// Everything made here belongs to the test that made it: listeners, connections,
// goroutines, processes and files end in t.Cleanup, and every wait is bounded.
// Nothing sleeps to let something happen; scripts are held and released by Gates.
package testkit
