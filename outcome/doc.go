// Package outcome is Waybill's public contract: the closed enumerations of
// CONTRACT section A, the codes of section U as data, the envelope of section L,
// the retry decision of section O, and the one mapping from a failure to an HTTP
// answer.
//
// It imports the standard library and a structured-fields library only, so that
// a client can depend on it without depending on the proxy. Everything in it is
// pure: no clock, no I/O, no global state.
package outcome
