package main

import (
	"crypto/rand"
	"fmt"

	"waybill/outcome"
)

func randomText() string { return rand.Text() }

// The schemas of the tools. They are plain – no references, no dialect – since hosts
// compile them with what they have.

type object = map[string]any

func text(description string) object { return object{"type": "string", "description": description} }

func number(description string, from, to int) object {
	return object{"type": "integer", "description": description, "minimum": from, "maximum": to}
}

func closed(required []string, properties object) object {
	s := object{"type": "object", "properties": properties, "additionalProperties": false}
	if len(required) > 0 {
		s["required"] = required
	}
	return s
}

// open is the schema of an answer: fields may be added (CONTRACT A8).
func open(properties object) object { return object{"type": "object", "properties": properties} }

// words is a closed enumeration.
func words[T fmt.Stringer](description string, values []T) object {
	names := make([]string, 0, len(values))
	for _, v := range values {
		names = append(names, v.String())
	}
	return object{"type": "string", "enum": names, "description": description}
}

func requestSchema() object {
	return closed([]string{"url"}, object{
		"method":          text("HTTP method; GET when absent"),
		"url":             text("absolute http or https URL, without user name and password"),
		"headers":         object{"type": "object", "additionalProperties": object{"type": "string"}, "description": "request fields; never credentials"},
		"body":            text("request body as text"),
		"body_base64":     text("request body in base64, for what is not text"),
		"timeout_seconds": number("how long to wait for the answer; what was sent goes on all the same. Absent: as long as the route allows", 1, 86400),
		"request_id":      text("your own token for this call, used once: get_action finds the action by it after an interruption. Made when absent"),
		"max_body_bytes":  number("how much of the answer's body to return; fetch_result has the rest", 1, maxBodyBytes),
		"unsafe_repeat":   unsafeSchema(),
	})
}

func unsafeSchema() object {
	return object{
		"type": "object", "additionalProperties": false, "required": []string{"invocation_id", "reason"},
		"description": "Only after you found out, at the other side, what an earlier equal request with an unknown outcome did: sends it again although it may have taken effect",
		"properties": object{
			"invocation_id": text("the earlier action"),
			"reason":        text("how you know that a second effect is impossible or acceptable"),
		},
	}
}

func actionSchema() object {
	return closed(nil, object{
		"invocation_id": text("act_…"), "request_id": text("the request id of the call"),
		"wait_seconds": number("wait so long for its end; what it is by then is returned", 1, maxWaitSeconds),
	})
}

func followUpSchema() object {
	return closed([]string{"invocation_id"}, object{"invocation_id": text("act_…")})
}

func execSchema() object {
	return closed([]string{"target", "user"}, object{
		"target":           text("host, or host:port, of an SSH route"),
		"user":             text("user at the other side"),
		"command":          text("the command line, as a shell reads it; or argv"),
		"argv":             object{"type": "array", "items": object{"type": "string"}, "description": "the words of the command; or command"},
		"stdin":            text("standard input as text"),
		"stdin_base64":     text("standard input in base64, for what is not text"),
		"env":              object{"type": "object", "additionalProperties": object{"type": "string"}, "description": "environment variables that the route lets through; never credentials"},
		"timeout_seconds":  number("how long to wait for its end; what was started goes on all the same. Absent: as long as the route allows", 1, 86400),
		"request_id":       text("your own token for this call, used once: get_action finds the action by it after an interruption. Made when absent"),
		"max_output_bytes": number("how much of each stream to return; fetch_result has the rest", 1, maxBodyBytes),
		"unsafe_repeat":    unsafeSchema(),
	})
}

func fetchSchema() object {
	return closed([]string{"invocation_id"}, object{
		"invocation_id":  text("act_…"),
		"offset":         object{"type": "integer", "minimum": 0, "description": "first byte of the body to return; of a command, of each stream"},
		"max_body_bytes": number("how much of the body to return", 1, maxBodyBytes),
	})
}

func listSchema() object {
	return closed(nil, object{
		"outcome":    words("only with this outcome", outcome.Outcomes()),
		"code":       text("only with this code, such as REMOTE_TIMEOUT"),
		"route":      text("only of this route"),
		"request_id": text("only of this request id"),
		"since":      object{"type": "string", "format": "date-time", "description": "only accepted since"},
		"open_only":  object{"type": "boolean", "description": "only those that still run"},
		"limit":      number("how many at most; 20 when absent", 1, 1000),
	})
}

func explainSchema() object {
	return closed([]string{"url"}, object{"method": text("HTTP method; GET when absent"), "url": text("absolute http or https URL")})
}

func phaseSchema() object {
	return words("where it stopped: diagnosis, never policy", outcome.Phases())
}
func outcomeSchema() object { return words("what is known about the remote side", outcome.Outcomes()) }
func retrySchema() object   { return words("what may be done now", outcome.Retries()) }

// The seventy codes are not listed: hosts show schemas to models, whose context is small.
func codeSchema() object { return text("how it ended, such as REMOTE_TIMEOUT; absent for a success") }

// envelopeSchema is configs/envelope.schema.json without its references.
func envelopeSchema() object {
	return object{
		"type": "object", "required": []string{"evidence"},
		"description": "what is known of the action, and how it is known; without error it succeeded",
		"properties": object{
			"invocation_id": text("the action; absent only where there is none, or its id is not known"),
			"error": object{
				"type": "object", "required": []string{"code", "message"},
				"properties": object{
					"code": codeSchema(), "phase": phaseSchema(), "outcome": outcomeSchema(), "retry": retrySchema(),
					"message": text("the first sentence says what may be done now"),
				},
			},
			"message":  text("error.message again"),
			"evidence": object{"type": "object", "description": "how Waybill knows"},
		},
	}
}

// withFailure adds what every tool returns when it fails.
func withFailure(properties object) object {
	properties["envelope"] = envelopeSchema()
	properties["request_id"] = text("leads to the action, with get_action")
	properties["source"] = text("where the envelope is from: body, fields, record or client")
	properties["retry_after_seconds"] = object{"type": "integer", "minimum": 0, "description": "the time that the answer asked to wait"}
	return open(properties)
}

func answerSchema() object {
	return withFailure(answerProperties())
}

// fetchedSchema is for an answer or the output of a command.
func fetchedSchema() object {
	p := answerProperties()
	for name, schema := range outputProperties() {
		p[name] = schema
	}
	return withFailure(p)
}

func execAnswerSchema() object {
	p := outputProperties()
	for _, name := range []string{"invocation_id", "phase", "outcome", "retry", "code", "offset", "next_offset", "submissions"} {
		p[name] = answerProperties()[name]
	}
	return withFailure(p)
}

func outputProperties() object {
	return object{
		"exit_status":   object{"type": "integer", "description": "of the command; what it did on the way the status does not tell"},
		"exit_signal":   text("the signal that ended it"),
		"stdout":        text("standard output, where it is text"),
		"stdout_base64": text("standard output, where it is not"),
		"stdout_bytes":  object{"type": "integer", "description": "length of the whole standard output"},
		"stderr":        text("standard error, where it is text"),
		"stderr_base64": text("standard error, where it is not"),
		"stderr_bytes":  object{"type": "integer", "description": "length of the whole standard error"},
	}
}

func answerProperties() object {
	return object{
		"invocation_id": text("the action"),
		"phase":         phaseSchema(), "outcome": outcomeSchema(), "retry": retrySchema(), "code": codeSchema(),
		"status":      object{"type": "integer", "description": "HTTP status of the origin"},
		"headers":     object{"type": "object", "additionalProperties": object{"type": "array", "items": object{"type": "string"}}},
		"body":        text("the body, where it is text"),
		"body_base64": text("the body, where it is not"),
		"body_bytes":  object{"type": "integer", "description": "length of the whole body"},
		"offset":      object{"type": "integer", "description": "where the part that is shown begins"},
		"next_offset": object{"type": "integer", "description": "where to go on; absent when the body ends here"},
		"job":         text("the action that follows work which was only accepted"),
		"replayed":    text("the earlier action whose recorded result this is"),
		"submissions": object{"type": "integer", "description": "how often the request was sent"},
	}
}

func viewSchema() object {
	return object{"type": "object", "required": []string{"invocation_id", "outcome", "retry", "ended"}, "properties": object{
		"invocation_id": text("the action"), "request_id": text("the request id of its call"),
		"route": text(""), "method": text(""), "target": text("without query values"),
		"phase": phaseSchema(), "outcome": outcomeSchema(), "retry": retrySchema(), "code": object{"type": "string"},
		"dispatch_started": object{"type": "boolean"}, "attempts": object{"type": "integer"},
		"accepted_at": text(""), "ended_at": text(""), "ended": object{"type": "boolean"}, "delivered": object{"type": "boolean"},
		"status": object{"type": "integer", "description": "of the stored result"},
		"link":   object{"type": "object", "description": "of an action that no caller sent: why it was started, and for which", "properties": object{"kind": text("reconcile, job or poll"), "of": text("an action")}},
	}}
}

func recordSchema() object {
	return withFailure(object{"action": viewSchema(), "items": object{"type": "array", "description": "the parts of a batch, each with facts of its own", "items": object{
		"type": "object", "properties": object{
			"index": object{"type": "integer"}, "id": text(""), "phase": phaseSchema(), "outcome": outcomeSchema(), "retry": retrySchema(), "code": codeSchema(),
		},
	}}})
}

func listedSchema() object {
	return withFailure(object{"actions": object{"type": "array", "items": viewSchema()}})
}

func explainedSchema() object {
	return withFailure(object{
		"decision": object{"type": "string", "enum": []string{"forward", "deny", "refuse", "tunnel", "no_route"}},
		"method":   text(""), "target": text("without query"), "route": text(""), "reason": text("why it is not forwarded"),
		"inject":   object{"type": "array", "items": object{"type": "object"}, "description": "the places only"},
		"contract": object{"type": "object"}, "limits": object{"type": "object"},
		"advice": object{"type": "array", "items": object{"type": "object", "properties": object{
			"at": text("the point at which it stops"), "phase": phaseSchema(), "outcome": outcomeSchema(), "retry": retrySchema(), "code": codeSchema(), "next": text(""),
		}}},
	})
}
