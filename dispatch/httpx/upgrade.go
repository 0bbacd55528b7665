package httpx

import (
	"crypto/sha1" //nolint:gosec // RFC 6455 §4.1 names it; it is no protection here
	"encoding/base64"
	"errors"
	"io"
	"net/http"
	"strings"

	"waybill/dispatch"
	"waybill/outcome"
)

// acceptKey answers a Sec-WebSocket-Key (RFC 6455 §4.2.2).
func acceptKey(key string) string {
	sum := sha1.Sum([]byte(key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11")) //nolint:gosec // see above
	return base64.StdEncoding.EncodeToString(sum[:])
}

var errHandshake = errors.New("httpx: a 101 that does not answer the handshake")

// switched judges a 101 to a request that asked for it. One that is no answer to this
// handshake (RFC 6455 §4.1) is no answer to the request.
func (c *conn) switched(out *dispatch.Outgoing, resp *http.Response, sink dispatch.Sink) dispatch.Ending {
	end := dispatch.Ending{Status: resp.StatusCode, Header: resp.Header}
	pipe, ok := resp.Body.(io.ReadWriteCloser)
	if !ok || len(resp.Header["Upgrade"]) != 1 || !strings.EqualFold(resp.Header.Get("Upgrade"), out.Upgrade) ||
		resp.Header.Get("Sec-WebSocket-Accept") != acceptKey(strings.TrimSpace(out.Header.Get("Sec-WebSocket-Key"))) ||
		len(resp.Header.Values("Sec-WebSocket-Extensions")) > 0 {
		end.Code, end.Err = outcome.CodeRemoteProtocolError, errHandshake
		return end
	}
	if err := sink.Head(resp.StatusCode, resp.Header, 0); err != nil {
		end.Code, end.SinkErr = outcome.CodeResultStoreFailed, err
		return end
	}
	end.Framing, end.Complete, end.Pipe = "switching_protocols", true, &upgradedConn{ReadWriteCloser: pipe, c: c}
	return end
}

// upgradedConn is the connection after a 101. It is never used for anything else.
type upgradedConn struct {
	io.ReadWriteCloser
	c *conn
}

// Close closes the connection.
func (u *upgradedConn) Close() error {
	err := u.ReadWriteCloser.Close()
	u.c.reusable.Store(false)
	u.c.Release()
	return err
}
