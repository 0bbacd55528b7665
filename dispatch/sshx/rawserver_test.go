package sshx_test

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/ecdh"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"

	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/knownhosts"

	"waybill/dispatch"
	"waybill/internal/testkit"
	"waybill/routes"
)

// Messages of RFC 4250 §4.1.2.
const (
	msgDisconnect     = 1
	msgServiceRequest = 5
	msgServiceAccept  = 6
	msgKexInit        = 20
	msgNewKeys        = 21
	msgKexECDHInit    = 30
	msgKexECDHReply   = 31
	msgAuthRequest    = 50
	msgAuthSuccess    = 52
	msgGlobalRequest  = 80
	msgRequestFailure = 82
	msgChannelOpen    = 90
	msgChannelConfirm = 91
	msgChannelData    = 94
	msgChannelEOF     = 96
	msgChannelClose   = 97
	msgChannelRequest = 98
	msgChannelSuccess = 99
)

// rawServer is an SSH server that says when it writes what, down to the segment: the
// library sends no SSH_MSG_DISCONNECT, and each packet by itself. It knows one algorithm
// of each kind, lets everybody in, and takes one command on a connection.
type rawServer struct {
	addr  string
	known string // the line of known_hosts
	key   ssh.Signer
	play  func(c *rawConn)
}

// rawConn is a connection whose command was asked for.
type rawConn struct {
	net.Conn
	in, out   cipher.AEAD
	inN, outN [12]byte
	ch        uint32 // the client's number of the channel
	buf       bytes.Buffer
}

func newRawServer(t *testing.T, host string, play func(c *rawConn)) *rawServer {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	_, key := testkit.SSHKey(t, "")
	s := &rawServer{addr: l.Addr().String(), key: key, known: knownhosts.Line([]string{host}, key.PublicKey()) + "\n", play: play}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer func() { _ = c.Close() }()
				if err := s.serve(c); err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) {
					t.Logf("raw server: %v", err)
				}
			}()
		}
	}()
	return s
}

// order is one of a command on s.
func (r *rig) rawOrder(host string, s *rawServer) *dispatch.Order {
	r.addr[host] = s.addr
	return &dispatch.Order{
		Target: routes.Target{Scheme: "ssh", Host: host, Port: 22}, Upstream: &routes.Upstream{}, Identity: "key@1",
		Exec: &dispatch.ExecOrder{User: "deploy", Signers: []ssh.Signer{r.signer}, SSH: &routes.SSH{Key: "key", KnownHosts: []byte(s.known)}},
	}
}

func sshString(b []byte) []byte {
	return append(binary.BigEndian.AppendUint32(nil, uint32(len(b))), b...)
} //nolint:gosec // short

func sshMPInt(b []byte) []byte {
	b = bytes.TrimLeft(b, "\x00")
	if len(b) > 0 && b[0]&0x80 != 0 {
		b = append([]byte{0}, b...)
	}
	return sshString(b)
}

// serve makes the handshake and goes on to the command.
func (s *rawServer) serve(nc net.Conn) error {
	c := &rawConn{Conn: nc}
	const version = "SSH-2.0-raw"
	if _, err := io.WriteString(nc, version+"\r\n"); err != nil {
		return err
	}
	var client []byte
	for b := make([]byte, 1); !bytes.HasSuffix(client, []byte("\r\n")); client = append(client, b[0]) {
		if _, err := io.ReadFull(nc, b); err != nil {
			return err
		}
	}
	client = bytes.TrimSuffix(client, []byte("\r\n"))
	mine := append([]byte{msgKexInit}, make([]byte, 16)...)
	const aead = "aes256-gcm@openssh.com"
	for _, names := range []string{"curve25519-sha256", s.key.PublicKey().Type(), aead, aead, "hmac-sha2-256-etm@openssh.com", "hmac-sha2-256-etm@openssh.com", "none", "none", "", ""} {
		mine = append(mine, sshString([]byte(names))...)
	}
	mine = append(mine, 0, 0, 0, 0, 0)
	if err := c.send(mine); err != nil {
		return err
	}
	theirs, err := c.next(msgKexInit)
	if err != nil {
		return err
	}
	first, err := c.next(msgKexECDHInit)
	if err != nil {
		return err
	}
	private, err := ecdh.X25519().GenerateKey(rand.Reader)
	if err != nil {
		return err
	}
	public, err := ecdh.X25519().NewPublicKey(first[5:])
	if err != nil {
		return err
	}
	secret, err := private.ECDH(public)
	if err != nil {
		return err
	}
	k := sshMPInt(secret)
	h := sha256.New()
	for _, b := range [][]byte{client, []byte(version), theirs, mine, s.key.PublicKey().Marshal(), first[5:], private.PublicKey().Bytes()} {
		h.Write(sshString(b))
	}
	h.Write(k)
	hash := h.Sum(nil)
	sig, err := s.key.Sign(rand.Reader, hash)
	if err != nil {
		return err
	}
	reply := append([]byte{msgKexECDHReply}, sshString(s.key.PublicKey().Marshal())...)
	reply = append(append(reply, sshString(private.PublicKey().Bytes())...), sshString(ssh.Marshal(sig))...)
	if err := errors.Join(c.send(reply), c.send([]byte{msgNewKeys})); err != nil {
		return err
	}
	if _, err := c.next(msgNewKeys); err != nil {
		return err
	}
	derive := func(tag byte, n int) []byte {
		sum := sha256.Sum256(bytes.Join([][]byte{k, hash, {tag}, hash}, nil))
		return sum[:n]
	}
	for _, side := range []struct {
		to      *cipher.AEAD
		nonce   []byte
		iv, key byte
	}{{&c.in, c.inN[:], 'A', 'C'}, {&c.out, c.outN[:], 'B', 'D'}} {
		block, err := aes.NewCipher(derive(side.key, 32))
		if err != nil {
			return err
		}
		if *side.to, err = cipher.NewGCM(block); err != nil {
			return err
		}
		copy(side.nonce, derive(side.iv, 12))
	}
	if _, err := c.next(msgServiceRequest); err != nil {
		return err
	}
	if err := c.send(append([]byte{msgServiceAccept}, sshString([]byte("ssh-userauth"))...)); err != nil {
		return err
	}
	if _, err := c.next(msgAuthRequest); err != nil {
		return err
	}
	if err := c.send([]byte{msgAuthSuccess}); err != nil {
		return err
	}
	open, err := c.next(msgChannelOpen)
	if err != nil {
		return err
	}
	c.ch = binary.BigEndian.Uint32(open[1+4+len("session"):])
	confirm := binary.BigEndian.AppendUint32([]byte{msgChannelConfirm}, c.ch)
	for _, n := range []uint32{7, 1 << 20, 1 << 15} {
		confirm = binary.BigEndian.AppendUint32(confirm, n)
	}
	if err := c.send(confirm); err != nil {
		return err
	}
	if _, err := c.next(msgChannelRequest); err != nil {
		return err
	}
	s.play(c)
	return nil
}

// send writes one packet.
func (c *rawConn) send(payload []byte) error {
	c.put(payload)
	return c.flush()
}

// put adds a packet to what flush writes in one segment.
func (c *rawConn) put(payload []byte) *rawConn {
	align, head := 8, 4 // RFC 4253 §6; the length is not encrypted with GCM (RFC 5647 §7.2)
	if c.out != nil {
		align, head = aes.BlockSize, 0
	}
	pad := align - (head+1+len(payload))%align
	if pad < 4 {
		pad += align
	}
	packet := append(append([]byte{byte(pad)}, payload...), make([]byte, pad)...)
	length := binary.BigEndian.AppendUint32(nil, uint32(len(packet))) //nolint:gosec // short
	c.buf.Write(length)
	if c.out != nil {
		packet = c.out.Seal(nil, c.outN[:], packet, length)
		step(&c.outN)
	}
	c.buf.Write(packet)
	return c
}

func (c *rawConn) flush() error {
	_, err := c.Write(c.buf.Bytes())
	c.buf.Reset()
	return err
}

// step counts up what of a nonce counts packets.
func step(n *[12]byte) { binary.BigEndian.PutUint64(n[4:], binary.BigEndian.Uint64(n[4:])+1) }

// packet reads one packet.
func (c *rawConn) packet() ([]byte, error) {
	var length [4]byte
	if _, err := io.ReadFull(c, length[:]); err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint32(length[:])
	if c.in != nil {
		n += 16
	}
	if n > 1<<20 {
		return nil, fmt.Errorf("a packet of %d bytes", n)
	}
	p := make([]byte, n)
	if _, err := io.ReadFull(c, p); err != nil {
		return nil, err
	}
	if c.in != nil {
		var err error
		if p, err = c.in.Open(nil, c.inN[:], p, length[:]); err != nil {
			return nil, err
		}
		step(&c.inN)
	}
	return p[1 : len(p)-int(p[0])], nil
}

// next reads to the next packet of a kind.
func (c *rawConn) next(kind byte) ([]byte, error) {
	for {
		p, err := c.packet()
		if err != nil {
			return nil, err
		}
		switch p[0] {
		case kind:
			return p, nil
		case msgDisconnect:
			return nil, io.EOF
		}
	}
}

// channel is a message about the channel.
func (c *rawConn) channel(kind byte, rest ...byte) []byte {
	return append(binary.BigEndian.AppendUint32([]byte{kind}, c.ch), rest...)
}

func (c *rawConn) data(text string) []byte {
	return c.channel(msgChannelData, sshString([]byte(text))...)
}

func (c *rawConn) status(n uint32) []byte {
	return c.channel(msgChannelRequest, binary.BigEndian.AppendUint32(append(sshString([]byte("exit-status")), 0), n)...)
}

func disconnect() []byte {
	b := binary.BigEndian.AppendUint32([]byte{msgDisconnect}, 11) // by application
	return append(append(b, sshString([]byte("bye"))...), sshString(nil)...)
}

// fin ends the connection as far as the client reads it. A close would reset it where
// something of the client's was not read, and what the client has not read is lost then.
func (c *rawConn) fin() { _ = c.Conn.(*net.TCPConn).CloseWrite() } //nolint:forcetypeassert // of a net.Listener "tcp"

// gone waits until the client has closed the connection.
func (c *rawConn) gone() { _, _ = c.next(0) }

// packets is a sequence by name, for tests: "eof status close disconnect".
func (c *rawConn) packets(sequence string) *rawConn {
	for name := range strings.FieldsSeq(sequence) {
		switch name {
		case "success":
			c.put(c.channel(msgChannelSuccess))
		case "data":
			c.put(c.data("made\n"))
		case "eof":
			c.put(c.channel(msgChannelEOF))
		case "status":
			c.put(c.status(0))
		case "close":
			c.put(c.channel(msgChannelClose))
		case "disconnect":
			c.put(disconnect())
		case "malformed": // data that is shorter than it says
			c.put(c.channel(msgChannelData, 0, 0, 0, 9))
		default:
			panic(name)
		}
	}
	return c
}
