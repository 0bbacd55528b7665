package outcome

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"net/http"
	"slices"
	"strings"

	"waybill/internal/control"
)

// Dialect is the form in which one API family's client libraries expect errors
// (CONTRACT L9): status and body of Waybill's own answers. The fields that carry
// the facts are the same in every dialect. The zero value is the default form, the
// envelope of L1.
type Dialect uint8

// The dialects. Docs/dialects.md says which form each has, and why.
const (
	DialectDefault     Dialect = iota
	DialectOpenAI              // also OpenRouter, Mistral, Azure OpenAI and others that speak it
	DialectAnthropic           //
	DialectGoogle              // google.rpc.Status as JSON
	DialectStripe              //
	DialectGitHub              // the REST API; GitHub's GraphQL API is DialectGraphQL
	DialectGit                 // git over HTTPS
	DialectSlack               //
	DialectDiscord             //
	DialectGraphQL             //
	DialectNotion              //
	DialectHuggingFace         //
	DialectSquare              //
	DialectKubernetes          //
	DialectAWSJSON             // awsJson1.0 and 1.1: DynamoDB, …
	DialectAWSQuery            // awsQuery: IAM, STS, …
	DialectAWSEC2              // ec2Query
	DialectAWSRESTXML          // restXml as S3 has it
	DialectAWSRESTJSON         // restJson1: Lambda, …
)

var dialectNames = [...]string{
	DialectDefault: "default", DialectOpenAI: "openai", DialectAnthropic: "anthropic", DialectGoogle: "google", DialectStripe: "stripe",
	DialectGitHub: "github", DialectGit: "git", DialectSlack: "slack", DialectDiscord: "discord", DialectGraphQL: "graphql", DialectNotion: "notion",
	DialectHuggingFace: "huggingface", DialectSquare: "square", DialectKubernetes: "kubernetes",
	DialectAWSJSON: "aws-json", DialectAWSQuery: "aws-query", DialectAWSEC2: "aws-ec2", DialectAWSRESTXML: "aws-rest-xml", DialectAWSRESTJSON: "aws-rest-json",
}

// Dialects returns every dialect, the default first.
func Dialects() []Dialect {
	return append([]Dialect{DialectDefault}, values[Dialect](len(dialectNames))...)
}

// Valid reports whether the dialect is one of Dialects.
func (d Dialect) Valid() bool { return int(d) < len(dialectNames) }

// String returns the name, or "invalid(n)".
func (d Dialect) String() string {
	if d == DialectDefault {
		return dialectNames[DialectDefault]
	}
	return name(dialectNames[:], int(d))
}

// MarshalText refuses an invalid dialect with ErrUnknownValue (CONTRACT A8).
func (d Dialect) MarshalText() ([]byte, error) {
	if d == DialectDefault {
		return []byte(dialectNames[DialectDefault]), nil
	}
	return marshal("dialect", dialectNames[:], int(d))
}

// UnmarshalText refuses unknown text with ErrUnknownValue (CONTRACT A8).
func (d *Dialect) UnmarshalText(text []byte) error {
	if string(text) == dialectNames[DialectDefault] {
		*d = DialectDefault
		return nil
	}
	i, err := parse("dialect", dialectNames[:], text)
	*d = Dialect(i)
	return err
}

// way is one of the three ways of CONTRACT L7: what a client library may do with an
// answer by itself.
type way uint8

const (
	waySettled    way = iota // nothing to repeat
	wayWaits                 // wait and repeat
	wayReconciles            // reconcile first
)

// wayOf finds the way by the advice alone. In a dialect there is one status for each
// way, so that no code can slip through with a status that the family's libraries
// repeat.
func wayOf(f Facts, s Shape) way {
	if f.Code == CodeRetryRefused || f.Code == CodeActionNotFound {
		return waySettled // this request, whatever the action's advice is
	}
	switch f.Retry {
	case Never, AfterCorrection, FetchResult:
		return waySettled
	case Backoff:
		return wayWaits
	case SameIdempotencyKey:
		if s.CallerSentKey {
			return wayWaits
		}
		return wayReconciles
	case Reconcile, RetryInvalid:
		return wayReconciles
	default:
		return wayReconciles
	}
}

// family is what a dialect makes of the three ways.
type family struct {
	wait      int // status of "wait and repeat"
	reconcile int // status of "reconcile first"
	// always200: the libraries repeat whatever is no 200, or look for errors in a 200
	// only. Answers to wait for keep their status, which stops these libraries for as
	// long as Retry-After says.
	always200 bool
	// settledOnly are the statuses that the libraries do not repeat, where they repeat
	// most; nil: those from 400 to 499 but 409.
	settledOnly []int
}

var families = [...]family{
	DialectDefault:     {}, // by the table of section U
	DialectOpenAI:      {wait: http.StatusTooManyRequests, reconcile: http.StatusFailedDependency},
	DialectAnthropic:   {wait: http.StatusTooManyRequests, reconcile: http.StatusFailedDependency},
	DialectGoogle:      {wait: http.StatusTooManyRequests, reconcile: http.StatusFailedDependency},
	DialectStripe:      {wait: http.StatusServiceUnavailable, reconcile: http.StatusFailedDependency},
	DialectGitHub:      {wait: http.StatusTooManyRequests, reconcile: http.StatusUnprocessableEntity, settledOnly: []int{400, 401, 403, 404, 410, 422, 451}},
	DialectGit:         {wait: http.StatusServiceUnavailable, reconcile: http.StatusFailedDependency},
	DialectSlack:       {wait: http.StatusTooManyRequests, reconcile: http.StatusFailedDependency, always200: true},
	DialectDiscord:     {wait: http.StatusTooManyRequests, reconcile: http.StatusFailedDependency},
	DialectGraphQL:     {wait: http.StatusTooManyRequests, reconcile: http.StatusFailedDependency, always200: true},
	DialectNotion:      {wait: http.StatusTooManyRequests, reconcile: http.StatusFailedDependency},
	DialectHuggingFace: {wait: http.StatusTooManyRequests, reconcile: http.StatusFailedDependency},
	DialectSquare:      {wait: http.StatusTooManyRequests, reconcile: http.StatusFailedDependency},
	DialectKubernetes:  {wait: http.StatusTooManyRequests, reconcile: http.StatusFailedDependency},
	DialectAWSJSON:     {wait: http.StatusServiceUnavailable, reconcile: http.StatusBadRequest},
	DialectAWSQuery:    {wait: http.StatusServiceUnavailable, reconcile: http.StatusBadRequest},
	DialectAWSEC2:      {wait: http.StatusServiceUnavailable, reconcile: http.StatusBadRequest},
	DialectAWSRESTXML:  {wait: http.StatusServiceUnavailable, reconcile: http.StatusBadRequest},
	DialectAWSRESTJSON: {wait: http.StatusServiceUnavailable, reconcile: http.StatusBadRequest},
}

// status returns the family's status. Usual is that of the default form, head says
// that there will be no body: then a 200 would have nowhere to say that it is none.
func (d Dialect) status(w way, usual int, head bool) int {
	fam := families[d]
	switch w {
	case wayWaits:
		if control.Off("O4-wait-status-of-the-family") {
			return usual
		}
		return fam.wait
	case waySettled, wayReconciles:
	}
	switch {
	case fam.always200 && !head && !control.Off("L9-slack-needs-200"):
		return http.StatusOK
	case w == wayReconciles:
		return fam.reconcile
	case fam.settledOnly != nil && slices.Contains(fam.settledOnly, usual):
		return usual
	case fam.settledOnly == nil && usual >= 400 && usual < 500 && usual != http.StatusConflict:
		return usual
	default:
		// 508 and 413 would be repeated by some, 202 be taken for the result.
		return http.StatusUnprocessableEntity
	}
}

// inDialect reports whether the answer takes the form of the shape's dialect. A
// success is no error, and what the proxy says about itself before any route is
// known – to a CONNECT, where a 200 would open the tunnel, and with 407 – is for the
// HTTP stack below the library.
func inDialect(f Facts, s Shape, status int) bool {
	return s.Dialect != DialectDefault && s.Dialect.Valid() && f.Code != CodeNone && !s.Connect && status != http.StatusProxyAuthRequired
}

// said is what a form has to say.
type said struct {
	way     way
	status  int
	code    string // "REMOTE_TIMEOUT"
	camel   string // "RemoteTimeout", for families whose codes look like this
	message string // first sentence is the instruction (CONTRACT L8)
	id      string // of the action; "" for none
	seconds int64  // of Retry-After, for answers to wait for
}

func (e *Envelope) said(f Facts, s Shape, status int) said {
	msg := e.Message
	if e.Error != nil && e.Error.Message != "" {
		msg = e.Error.Message
	}
	if msg == "" {
		msg = Message(e.InvocationID, f, "", e.Evidence)
	}
	v := said{way: wayOf(f, s), status: status, code: f.Code.String(), camel: camel(f.Code), message: msg, seconds: waitSeconds(s.RetryAfter)}
	if isFieldID(e.InvocationID) {
		v.id = e.InvocationID
	}
	return v
}

// camel spells a code in the way of AWS and Kubernetes. That none is a word on which
// their libraries repeat is tested.
func camel(c Code) string {
	var b strings.Builder
	for word := range strings.SplitSeq(c.String(), "_") {
		b.WriteString(word[:1] + strings.ToLower(word[1:]))
	}
	return b.String()
}

// form writes the body in the family's form and adds the fields that belong to the
// form: Content-Type, and where libraries look there, code and request id. It
// returns nil for the default.
func (d Dialect) form(h http.Header, v said) []byte {
	switch d {
	case DialectGit:
		// Git prints it line by line as "remote: …", and only when it is text/plain.
		h.Set("Content-Type", "text/plain; charset=utf-8")
		return []byte(v.message + "\n" + strings.TrimSpace(v.code+" "+v.id) + "\n")
	case DialectAWSQuery, DialectAWSEC2, DialectAWSRESTXML:
		h.Set("Content-Type", "text/xml; charset=utf-8")
		if d == DialectAWSRESTXML {
			h.Set("Content-Type", "application/xml")
			setID(h, "X-Amz-Request-Id", v.id)
		} else {
			setID(h, "X-Amzn-Requestid", v.id)
		}
		b, err := xml.Marshal(d.document(v))
		if err != nil {
			return nil
		}
		return append([]byte(xml.Header), append(b, '\n')...)
	case DialectAWSJSON:
		h.Set("Content-Type", "application/x-amz-json-1.0")
		setID(h, "X-Amzn-Requestid", v.id)
	case DialectAWSRESTJSON:
		h.Set("Content-Type", "application/json")
		h.Set("X-Amzn-Errortype", v.camel) // restJson1 has the code here
		setID(h, "X-Amzn-Requestid", v.id)
	case DialectDefault:
		return nil
	case DialectOpenAI, DialectAnthropic, DialectGoogle, DialectStripe, DialectGitHub, DialectSlack, DialectDiscord, DialectGraphQL, DialectNotion,
		DialectHuggingFace, DialectSquare, DialectKubernetes:
		h.Set("Content-Type", "application/json")
	default:
		return nil
	}
	b, err := encodeJSON(d.object(v))
	if err != nil {
		return nil
	}
	return b
}

func setID(h http.Header, name, id string) {
	if id != "" {
		h.Set(name, id)
	}
}

func encodeJSON(v any) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

// pick chooses by the way.
func pick[T any](w way, settledIs, waitIs, reconcileIs T) T {
	switch w {
	case wayWaits:
		return waitIs
	case wayReconciles:
		return reconcileIs
	case waySettled:
		return settledIs
	default:
		return settledIs
	}
}

// object is the family's error object, nil for a family whose form is not JSON.
//
// Where a family has a closed set of types beside the code, "reconcile first" takes
// the one for requests that are not to be sent again as they are: agents and
// frameworks repeat on the words for server errors (api_error, overloaded_error),
// whatever the status.
func (d Dialect) object(v said) any {
	switch d {
	case DialectOpenAI:
		type inner struct {
			Message string  `json:"message"`
			Type    string  `json:"type"`
			Code    string  `json:"code"`
			Param   *string `json:"param"`
		}
		return struct {
			Error inner `json:"error"`
		}{inner{v.message, pick(v.way, "invalid_request_error", "rate_limit_error", "invalid_request_error"), v.code, nil}}
	case DialectAnthropic:
		typ := pick(v.way, "invalid_request_error", "rate_limit_error", "invalid_request_error")
		switch v.status {
		case http.StatusForbidden:
			typ = "permission_error"
		case http.StatusNotFound:
			typ = "not_found_error"
		case http.StatusRequestEntityTooLarge:
			typ = "request_too_large"
		}
		type inner struct {
			Type    string `json:"type"`
			Message string `json:"message"`
		}
		return struct {
			Type      string `json:"type"`
			Error     inner  `json:"error"`
			RequestID string `json:"request_id,omitempty"`
		}{"error", inner{typ, v.message}, v.id}
	case DialectGoogle:
		return googleObject(v)
	case DialectStripe:
		type inner struct {
			Type    string `json:"type"`
			Code    string `json:"code"`
			Message string `json:"message"`
		}
		return struct {
			Error inner `json:"error"`
		}{inner{pick(v.way, "invalid_request_error", "api_error", "api_error"), v.code, v.message}}
	case DialectGitHub:
		// Octokit appends the address to the message. This one is answered by the proxy.
		doc := ""
		if v.id != "" {
			doc = "http://waybill.internal/v1/actions/" + v.id
		}
		return struct {
			Message string `json:"message"`
			Doc     string `json:"documentation_url,omitempty"`
		}{v.message, doc}
	case DialectSlack:
		type metadata struct {
			Messages []string `json:"messages"`
		}
		// The library shows the word; it logs the messages that begin like this. There is
		// no "message" beside them: in answers of chat.* it is an object, and a text in its
		// place is a parse error to slack-go.
		return struct {
			OK       bool     `json:"ok"`
			Error    string   `json:"error"`
			Metadata metadata `json:"response_metadata"`
		}{false, pick(v.way, v.code, "ratelimited", v.code), metadata{[]string{"[ERROR] " + v.message}}}
	case DialectDiscord:
		if v.way == wayWaits {
			return struct {
				Message    string `json:"message"`
				RetryAfter int64  `json:"retry_after"`
				Global     bool   `json:"global"`
			}{v.message, v.seconds, false}
		}
		return struct {
			Code    int    `json:"code"`
			Message string `json:"message"`
		}{0, v.message}
	case DialectGraphQL:
		type extensions struct {
			Code string `json:"code"`
		}
		type inner struct {
			Message    string     `json:"message"`
			Extensions extensions `json:"extensions"`
		}
		return struct {
			Data   *struct{} `json:"data"`
			Errors []inner   `json:"errors"`
		}{nil, []inner{{v.message, extensions{v.code}}}}
	case DialectNotion:
		// The library shows the message only beside a code that it knows, and repeats on
		// "rate_limited" and on the codes of server errors.
		code := pick(v.way, "validation_error", "rate_limited", "validation_error")
		switch v.status {
		case http.StatusForbidden:
			code = "restricted_resource"
		case http.StatusNotFound:
			code = "object_not_found"
		}
		return struct {
			Object    string `json:"object"`
			Status    int    `json:"status"`
			Code      string `json:"code"`
			Message   string `json:"message"`
			RequestID string `json:"request_id,omitempty"`
		}{"error", v.status, code, v.message, v.id}
	case DialectHuggingFace:
		return struct {
			Error string `json:"error"`
		}{v.message}
	case DialectSquare:
		type inner struct {
			Category string `json:"category"`
			Code     string `json:"code"`
			Detail   string `json:"detail"`
		}
		return struct {
			Errors []inner `json:"errors"`
		}{[]inner{{
			pick(v.way, "INVALID_REQUEST_ERROR", "RATE_LIMIT_ERROR", "INVALID_REQUEST_ERROR"),
			pick(v.way, v.code, "RATE_LIMITED", v.code), v.message,
		}}}
	case DialectKubernetes:
		return kubernetesObject(v)
	case DialectAWSJSON:
		return struct {
			Type    string `json:"__type"`
			Message string `json:"message"`
		}{"waybill#" + v.camel, v.message}
	case DialectAWSRESTJSON:
		return struct {
			Message string `json:"message"`
		}{v.message}
	case DialectDefault, DialectGit, DialectAWSQuery, DialectAWSEC2, DialectAWSRESTXML:
		return nil
	default:
		return nil
	}
}

// googleObject is google.rpc.Status as its APIs put it into JSON (AIP-193).
// FAILED_PRECONDITION is the code for what must not be repeated before the state was
// set right; UNAVAILABLE, ABORTED and UNKNOWN are repeated by libraries.
func googleObject(v said) any {
	type detail struct {
		Type   string `json:"@type"`
		Reason string `json:"reason,omitempty"`
		Domain string `json:"domain,omitempty"`
		Delay  string `json:"retryDelay,omitempty"`
	}
	type inner struct {
		Code    int      `json:"code"`
		Message string   `json:"message"`
		Status  string   `json:"status"`
		Details []detail `json:"details"`
	}
	status := pick(v.way, "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION")
	switch v.status {
	case http.StatusBadRequest, http.StatusRequestEntityTooLarge:
		status = "INVALID_ARGUMENT"
	case http.StatusForbidden:
		status = "PERMISSION_DENIED"
	case http.StatusNotFound:
		status = "NOT_FOUND"
	}
	e := inner{Code: v.status, Message: v.message, Status: status, Details: []detail{{Type: "type.googleapis.com/google.rpc.ErrorInfo", Reason: v.code, Domain: proxyName}}}
	if v.way == wayWaits {
		e.Details = append(e.Details, detail{Type: "type.googleapis.com/google.rpc.RetryInfo", Delay: retryAfterText(v.seconds) + "s"})
	}
	return struct {
		Error inner `json:"error"`
	}{e}
}

// kubernetesObject is a Status of meta/v1. Its libraries repeat 429 and 5xx when
// Retry-After is there; reason and details are for programs.
func kubernetesObject(v said) any {
	type details struct {
		RetryAfterSeconds int64 `json:"retryAfterSeconds"`
	}
	var wait *details
	if v.way == wayWaits {
		wait = &details{v.seconds}
	}
	return struct {
		Kind       string   `json:"kind"`
		APIVersion string   `json:"apiVersion"`
		Metadata   struct{} `json:"metadata"`
		Status     string   `json:"status"`
		Message    string   `json:"message"`
		Reason     string   `json:"reason"`
		Details    *details `json:"details,omitempty"`
		Code       int      `json:"code"`
	}{"Status", "v1", struct{}{}, "Failure", v.message, pick(v.way, v.camel, "TooManyRequests", v.camel), wait, v.status}
}

// document is the error document of an AWS protocol that speaks XML. A body in JSON
// would be a parse error there, which some libraries repeat.
func (d Dialect) document(v said) any {
	type detail struct {
		Code    string `xml:"Code"`
		Message string `xml:"Message"`
	}
	switch d { //nolint:exhaustive // only the three that speak XML come here
	case DialectAWSEC2:
		return struct {
			XMLName xml.Name `xml:"Response"`
			Errors  []detail `xml:"Errors>Error"`
			ID      string   `xml:"RequestID"`
		}{Errors: []detail{{v.camel, v.message}}, ID: v.id}
	case DialectAWSRESTXML:
		return struct {
			XMLName xml.Name `xml:"Error"`
			detail
			ID string `xml:"RequestId"`
		}{detail: detail{v.camel, v.message}, ID: v.id}
	default:
		type typed struct {
			Type string `xml:"Type"`
			detail
		}
		return struct {
			XMLName xml.Name `xml:"ErrorResponse"`
			Error   typed    `xml:"Error"`
			ID      string   `xml:"RequestId"`
		}{Error: typed{pick(v.way, "Sender", "Receiver", "Sender"), detail{v.camel, v.message}}, ID: v.id}
	}
}

// LastEvent returns the event that tells a reader of text/event-stream why its
// stream breaks off, in the form of the shape's dialect (CONTRACT H5, L9): by default
// the envelope as an event of the type "error". Tail is the end of what the reader
// got, at least its last four bytes. When the origin broke off inside an event, that
// event becomes this one: it is never dispatched under its own type (WHATWG HTML
// §9.2.6). It is nil when the envelope cannot be encoded.
func (e *Envelope) LastEvent(s Shape, tail []byte) []byte {
	env := e.presentable()
	f := env.Facts()
	d := s.Dialect
	if !d.Valid() || f.Code == CodeNone {
		d = DialectDefault
	}
	var object any = &env
	if d != DialectDefault {
		if o := d.object(env.said(f, s, d.status(wayOf(f, s), statusOf(f, s), false))); o != nil {
			object = o
		}
	}
	data, err := encodeJSON(object)
	if err != nil {
		return nil
	}
	var b bytes.Buffer
	if len(tail) > 0 && tail[len(tail)-1] != '\n' {
		b.WriteByte('\n')
	}
	switch {
	case d == DialectGraphQL:
		// GraphQL over SSE knows "next" and "complete", and the latter would be a clean end.
		b.WriteString("event: next\n")
	case d == DialectOpenAI || d == DialectGoogle || d == DialectHuggingFace:
		// Their streams have no types; the libraries look for "error" in the data.
		if !betweenEvents(tail) {
			b.WriteString("event: error\n")
		}
	default:
		b.WriteString("event: error\n")
	}
	b.WriteString("data: ")
	b.Write(data) // ends its line
	b.WriteByte('\n')
	return b.Bytes()
}

// betweenEvents reports whether a stream ended behind a complete event.
func betweenEvents(tail []byte) bool {
	for _, end := range []string{"\n\n", "\r\n\r\n", "\r\r", "\n\r\n"} {
		if bytes.HasSuffix(tail, []byte(end)) {
			return true
		}
	}
	return len(tail) == 0
}
