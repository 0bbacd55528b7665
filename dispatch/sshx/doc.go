// Package sshx carries an action that is a command over SSH. It makes and verifies
// connections stage by stage (CONTRACT E1, E2, E5), keeps them by target, credential
// and what they were verified against (E6), opens a fresh channel for each command,
// and drives the exec request on that channel itself: the boundary is before it (F4).
// A tap below the SSH transport tells a peer that closed a channel from a connection
// that was lost, or that the peer ended by a message, which the library does not (G9). In
// one case it cannot: an orderly end in one piece with such a message is incomplete.
//
// It assumes that whoever calls Exchange has made DISPATCH_STARTED durable (F1).
package sshx
