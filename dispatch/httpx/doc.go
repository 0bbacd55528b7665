// Package httpx carries an action over HTTP/1.1 or HTTP/2. It dials and verifies
// connections itself, stage by stage (CONTRACT E1, E2, V3), puts a tap on the
// plaintext side that counts bytes and reads frames, and hands requests to
// net/http's ClientConn, which never retries, never reconnects and never follows
// redirects (F6).
//
// It assumes that whoever calls Exchange has made DISPATCH_STARTED durable (F1).
package httpx
