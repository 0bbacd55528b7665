// Package bench measures what Waybill costs, as ratios to a well-configured bare
// goproxy: the same load, the same upstream, the same injected header, on one
// machine in one session, round by round in turn. `make bench` runs it.
//
// It owns the scenarios, the load generator, the upstream, the proxies it compares
// with and the arithmetic. It talks to loopback only, and every load is bounded in
// count and time. Nothing of it is part of the product.
//
// Three kinds of process take part besides the proxies: the driver (which starts
// and ends the others), the origin, and one load generator per measurement. Both
// ends are raw HTTP/1.1 on purpose: on a small machine they share the cores with
// the proxy, and what they burn hides what the proxy costs.
package bench
