package main

import (
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"

	"waybill/journal"
)

// Paths of the admin API that are the journal's own.
const (
	pathAcknowledge = "/v1/journal/acknowledge"
	pathBackup      = "/v1/journal/backup"
)

// journalAdmin answers what only the journal knows, and passes the rest on. It stands
// on the admin socket, which only the owner can open; like next it keeps browser
// pages out (CONTRACT V5).
func journalAdmin(j *journal.Journal, log *slog.Logger, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case !ownHost(r) || r.Header.Get("Origin") != "":
			next.ServeHTTP(w, r) // refuses
		case r.URL.Path == pathAcknowledge && r.Method == http.MethodPost:
			acknowledge(j, w, r)
		case r.URL.Path == pathBackup && r.Method == http.MethodGet:
			backup(j, log, w, r)
		default:
			next.ServeHTTP(w, r)
		}
	})
}

func ownHost(r *http.Request) bool {
	host := r.Host
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	return strings.EqualFold(host, "waybill") || strings.EqualFold(host, "localhost")
}

// acknowledgeRequest is the body of POST /v1/journal/acknowledge.
type acknowledgeRequest struct {
	Reason string `json:"reason"`
}

// acknowledgeAnswer is its answer; Problem is set when nothing was acknowledged.
type acknowledgeAnswer struct {
	Acknowledged bool   `json:"acknowledged"`
	Restart      bool   `json:"restart"` // it takes effect at the proxy's next start
	Problem      string `json:"problem,omitempty"`
}

func acknowledge(j *journal.Journal, w http.ResponseWriter, r *http.Request) {
	var in acknowledgeRequest
	dec := json.NewDecoder(io.LimitReader(r.Body, 64<<10))
	dec.DisallowUnknownFields()
	out, status := acknowledgeAnswer{}, http.StatusOK
	err := dec.Decode(&in)
	if err == nil {
		err = j.Acknowledge(in.Reason)
	} else {
		err = journal.ErrReason
	}
	switch {
	case err == nil:
		out.Acknowledged, out.Restart = true, true
	case errors.Is(err, journal.ErrReason):
		status, out.Problem = http.StatusBadRequest, err.Error()
	case errors.Is(err, journal.ErrNotQuarantined):
		status, out.Problem = http.StatusConflict, err.Error()
	default:
		status, out.Problem = http.StatusServiceUnavailable, "journal: the acknowledgement could not be written"
	}
	b, err := json.Marshal(out)
	if err != nil {
		status, b = http.StatusInternalServerError, nil
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_, _ = w.Write(b)
}

// backup streams a backup. One that cannot be finished ends without its last chunk,
// so that nobody takes it for whole.
func backup(j *journal.Journal, log *slog.Logger, w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Cache-Control", "no-store")
	info, err := j.Backup(r.Context(), w)
	if err != nil {
		log.Error("journal backup", slog.Any("error", err))
		panic(http.ErrAbortHandler)
	}
	log.Info("journal backup", slog.Uint64("seq", info.Seq), slog.Int("entries", info.Entries))
}
