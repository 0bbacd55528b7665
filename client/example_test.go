package client_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"

	"waybill/client"
	"waybill/outcome"
)

const exampleAction = "act_01JD0000000000000000000000"

// standIn plays a Waybill proxy for the examples: "/charges" is answered by the origin
// unless its body says otherwise.
func standIn() (proxy string, stop func()) {
	timeout := outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.Reconcile, Code: outcome.CodeRemoteTimeout}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if strings.Contains(string(body), "slow") && r.Header.Get("Waybill-Supersedes") == "" {
			env := outcome.NewEnvelope(exampleAction, timeout, "", outcome.Evidence{DispatchStarted: true})
			a := env.Answer(outcome.Shape{})
			for k, v := range a.Header {
				w.Header()[k] = v
			}
			w.WriteHeader(a.Status)
			_, _ = w.Write(a.Body)
			return
		}
		f := outcome.Success()
		switch {
		case r.URL.Path == "/v1/ssh/exec":
			outcome.Annotate(w.Header(), exampleAction, f, outcome.Shape{ReceivedStatus: http.StatusOK}, true)
			_, _ = io.WriteString(w, `{"invocation_id":"`+exampleAction+`","outcome":"committed","exit_status":0,"stdout":"up 4 days\n","stderr":"","evidence":{"dispatch_started":true,"response_complete":true}}`)
			return
		case strings.HasPrefix(r.URL.Path, "/v1/actions/") && !strings.HasSuffix(r.URL.Path, "/result"):
			// What was asked about, or waited for, turned out to have happened.
			env := outcome.NewEnvelope(exampleAction, f, "", outcome.Evidence{DispatchStarted: true, ResponseComplete: true, Source: outcome.RemoteQuery})
			_ = json.NewEncoder(w).Encode(map[string]any{"action": map[string]any{"invocation_id": exampleAction, "phase": f.Phase, "outcome": f.Outcome, "retry": f.Retry, "ended": true}, "envelope": env})
			return
		case strings.Contains(string(body), "large") && r.URL.Path == "/charges":
			pending, _ := outcome.Of(outcome.CodeApprovalPending)
			env := outcome.NewEnvelope(exampleAction, pending, "", outcome.Evidence{})
			a := env.Answer(outcome.Shape{})
			for k, v := range a.Header {
				w.Header()[k] = v
			}
			w.WriteHeader(a.Status)
			_, _ = w.Write(a.Body)
			return
		}
		if strings.HasSuffix(r.URL.Path, "/result") {
			w.Header().Set(outcome.HeaderInvocation, exampleAction)
			w.Header().Set(outcome.HeaderOutcome, outcome.FormatOutcome(f))
		} else {
			outcome.Annotate(w.Header(), exampleAction, f, outcome.Shape{ReceivedStatus: http.StatusCreated}, true)
		}
		w.WriteHeader(http.StatusCreated)
		_, _ = io.WriteString(w, `{"id":"ch_1"}`)
	}))
	return s.URL, s.Close
}

func exampleClient() (*client.Client, func()) {
	proxy, stop := standIn()
	c, err := client.New(client.Options{Proxy: proxy, AbsoluteForm: true})
	if err != nil {
		panic(err)
	}
	return c, stop
}

func charge(body string) *http.Request {
	req, err := http.NewRequestWithContext(context.Background(), http.MethodPost, "https://api.example.com/charges", strings.NewReader(body))
	if err != nil {
		panic(err)
	}
	return req
}

// In a program that "waybill run" started, the environment says where the proxy is.
func ExampleFromEnvironment() {
	environment := map[string]string{"HTTPS_PROXY": "http://ses_1:wbs_1@127.0.0.1:7171"}
	o, err := client.FromEnvironment(func(name string) string { return environment[name] })
	if err != nil {
		fmt.Println(err)
		return
	}
	_, err = client.New(o)
	fmt.Println(err)
	// Output: <nil>
}

func ExampleClient_Do() {
	c, stop := exampleClient()
	defer stop()
	resp, err := c.Do(charge("amount=5"))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	fmt.Println(resp.StatusCode, string(body), err)
	fmt.Println(resp.InvocationID, resp.Facts.Outcome)
	// Output:
	// 201 {"id":"ch_1"} <nil>
	// act_01JD0000000000000000000000 committed
}

// What to do about a failure is in its facts, never in its text.
func ExampleError() {
	c, stop := exampleClient()
	defer stop()
	_, err := c.Do(charge("slow"))
	var e *client.Error
	if !errors.As(err, &e) {
		fmt.Println(err)
		return
	}
	switch f := e.Facts(); f.Retry {
	case outcome.Backoff, outcome.SameIdempotencyKey:
		fmt.Println("the client has repeated it as often as it may")
	case outcome.FetchResult:
		fmt.Println("fetch", e.Envelope.InvocationID)
	case outcome.Reconcile:
		fmt.Println("find out what happened to", e.Envelope.InvocationID, "at the other side:", f.Outcome)
	case outcome.Never, outcome.AfterCorrection:
		fmt.Println("not like this:", e.Envelope.Evidence.Field)
	}
	// Output: find out what happened to act_01JD0000000000000000000000 at the other side: unknown
}

// To repeat what may have happened is a decision, and looks like one.
func ExampleUnsafeRepeat() {
	c, stop := exampleClient()
	defer stop()
	_, err := c.Do(charge("slow"))
	var e *client.Error
	if errors.As(err, &e) && e.Facts().Retry == outcome.Reconcile {
		resp, err := c.Do(charge("slow"), client.UnsafeRepeat(e.Envelope.InvocationID, "looked in the dashboard: no such charge"))
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Println(resp.StatusCode)
		_ = resp.Body.Close()
	}
	// Output: 201
}

func ExampleClient_Result() {
	c, stop := exampleClient()
	defer stop()
	resp, err := c.Result(context.Background(), exampleAction)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	fmt.Println(resp.StatusCode, string(body), err)
	// Output: 201 {"id":"ch_1"} <nil>
}

// A vendor's library takes an http.Client. AnswerFailures keeps it from repeating what
// came back as an error, and the trace has what the library does not show.
func ExampleClient_HTTPClient() {
	proxy, stop := standIn()
	defer stop()
	c, err := client.New(client.Options{Proxy: proxy, AbsoluteForm: true, AnswerFailures: true, Repeats: -1})
	if err != nil {
		fmt.Println(err)
		return
	}
	vendor := c.HTTPClient() // vendor.NewClient(vendor.WithHTTPClient(…))
	ctx, trace := client.WithTrace(context.Background())
	resp, err := vendor.Do(charge("slow").WithContext(ctx))
	if err != nil {
		fmt.Println(err)
		return
	}
	_ = resp.Body.Close()
	last, _ := trace.Last()
	fmt.Println(resp.StatusCode, resp.Header.Get("X-Should-Retry"), last.InvocationID, last.Facts.Retry)
	// Output: 424 false act_01JD0000000000000000000000 reconcile
}

// A command that came to its end is a result, whatever its exit status; Err makes an
// error of one that failed.
func ExampleClient_SSHExec() {
	c, stop := exampleClient()
	defer stop()
	r, err := c.SSHExec(context.Background(), client.Command{Target: "build.example.com", User: "deploy", Argv: []string{"uptime", "-p"}})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Printf("%d %q %v\n", *r.ExitStatus, r.Stdout, r.Err())
	// Output: 0 "up 4 days\n" <nil>
}

// An outcome that is not known is asked about, where the route has a query for it.
func ExampleClient_Reconcile() {
	c, stop := exampleClient()
	defer stop()
	_, err := c.Do(charge("slow"))
	var e *client.Error
	if errors.As(err, &e) && e.Facts().Retry == outcome.Reconcile {
		a, err := c.Reconcile(context.Background(), e.Envelope.InvocationID)
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Println(a.Outcome, a.Envelope.Evidence.Source)
	}
	// Output: committed remote_query
}

// A request that a person has to approve is waited for, and not sent again.
func ExampleClient_WaitResult() {
	c, stop := exampleClient()
	defer stop()
	_, err := c.Do(charge("large"))
	var e *client.Error
	if errors.As(err, &e) && e.Facts().Code == outcome.CodeApprovalPending {
		resp, err := c.WaitResult(context.Background(), e.Envelope.InvocationID)
		if err != nil {
			fmt.Println(err)
			return
		}
		body, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		fmt.Println(resp.StatusCode, string(body), err)
	}
	// Output: 201 {"id":"ch_1"} <nil>
}
