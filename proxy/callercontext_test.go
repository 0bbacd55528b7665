package proxy

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"waybill/dispatch"
	"waybill/internal/contract"
	"waybill/outcome"
)

// TestCallerContext: a caller that leaves while its body is on its way does not end the
// context (UP-03), from the body's clean end on it does (F10), and what was derived then
// ends with it; a refusal is recorded whoever is left (M6).
func TestCallerContext(t *testing.T) {
	contract.Covers(t, "F10")
	begin := func(s *dispatch.Submission) (context.Context, *exchange, context.CancelFunc) {
		base, leave := context.WithCancel(t.Context())
		r, err := http.NewRequestWithContext(context.WithValue(base, connKey{}, &connState{}), http.MethodPost, "http://pay.example.test/", nil)
		if err != nil {
			t.Fatal(err)
		}
		x := &exchange{}
		return x.callerContext(r, s), x, leave
	}
	open := func(ctx context.Context) bool { return ctx.Err() == nil && ctx.Done() == nil }

	t.Run("body", func(t *testing.T) {
		s := &dispatch.Submission{Body: io.MultiReader(strings.NewReader("a"), strings.NewReader("b"))}
		ctx, x, leave := begin(s)
		if _, err := s.Body.Read(make([]byte, 1)); err != nil || !open(ctx) {
			t.Fatal("a part of the body is not the whole", err)
		}
		leave()
		if !open(ctx) {
			t.Fatal("the body is on its way: that it breaks off is what ends it")
		}
		if _, err := io.ReadAll(s.Body); err != nil || x.body.cut() {
			t.Fatal(err)
		}
		select {
		case <-ctx.Done():
		default:
			t.Fatal("the body is whole and the caller left")
		}
		if !errors.Is(ctx.Err(), context.Canceled) {
			t.Fatal(ctx.Err())
		}
	})
	t.Run("broken body", func(t *testing.T) {
		s := &dispatch.Submission{Body: io.MultiReader(strings.NewReader("a"), failing{})}
		ctx, x, leave := begin(s)
		if _, err := io.ReadAll(s.Body); !errors.Is(err, io.ErrUnexpectedEOF) || !x.body.cut() {
			t.Fatal("it broke off", err)
		}
		if leave(); !open(ctx) {
			t.Fatal("an incomplete request is not a cancelled one")
		}
	})
	t.Run("no body", func(t *testing.T) {
		ctx, x, leave := begin(&dispatch.Submission{})
		wait, cancel := context.WithTimeout(ctx, time.Hour)
		defer cancel()
		leave()
		<-wait.Done()
		if !errors.Is(wait.Err(), context.Canceled) || errors.Is(context.Cause(wait), context.DeadlineExceeded) || x.body.cut() {
			t.Fatal(wait.Err(), context.Cause(wait))
		}
	})
	t.Run("refused", func(t *testing.T) {
		s := &dispatch.Submission{Body: strings.NewReader("a"), Refused: refusal(outcome.CodeInvalidRequest, "", "", "")}
		ctx, _, leave := begin(s)
		if leave(); !open(ctx) || s.Body != nil {
			t.Fatal("it is recorded all the same, and nothing of its body is read")
		}
	})
}

// failing is the rest of a body that broke off.
type failing struct{}

func (failing) Read([]byte) (int, error) { return 0, io.ErrUnexpectedEOF }
