// Package dispatch is the one pipeline that carries an action from bound to
// delivered (DESIGN section 1). It owns the events, their projection and the
// journal interface; HTTP and SSH are transports of it (dispatch/httpx).
//
// What it promises: nothing is handed to a transport before DISPATCH_STARTED is
// durable (CONTRACT F1); what a caller is told is the projection of the records
// that exist (M6), never what an error suggests; and an attempt that crossed the
// boundary never becomes not_attempted again (F2).
package dispatch
