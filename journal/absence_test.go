package journal

import (
	"errors"
	"fmt"
	"math"
	"testing"
	"time"

	"waybill/dispatch"
	"waybill/internal/contract"
)

// The filter never hides an action that guards or redirected: not while it is loaded,
// not after a restart, not when it is full; and of what is not there it mostly knows.
func TestAbsence(t *testing.T) {
	contract.Covers(t, "O3", "R3")
	dir := tempDir(t)
	j := openTest(t, dir, nil)
	const n = 40
	for i := range n {
		id := newID()
		mustAppend(t, j, toDispatch(id, "ci", "", fmt.Sprint("f", i)))
		if i%2 == 0 {
			mustAppend(t, j, dispatch.Batch{Action: id, Events: []dispatch.Event{evResolved(1, unknown)}})
		}
	}
	check := func(open bool) {
		t.Helper()
		for i := range n {
			_, err := j.Guarding(bg, "ci", fmt.Sprint("f", i))
			// What was open at the restart is unknown, and guards since then.
			if want := i%2 == 0 || !open; (err == nil) != want || err != nil && !errors.Is(err, dispatch.ErrActionNotFound) {
				t.Errorf("action %d: %v, guards: %v", i, err, want)
			}
		}
	}
	loaded := func() {
		t.Helper()
		for end := time.Now().Add(10 * time.Second); !j.absence.ready.Load(); {
			if time.Now().After(end) {
				t.Fatal("not loaded")
			}
			time.Sleep(time.Millisecond)
		}
	}
	loaded()
	check(true)
	closeTest(t, j)
	j = openTest(t, dir, nil)
	check(false) // loaded or not
	loaded()
	check(false)
	hidden := 0
	for i := range 1000 {
		mac := j.seal.mac(macGuard, "ci", fmt.Sprint("nobody", i))
		if j.absence.certain(&mac) {
			hidden++
		}
	}
	if hidden < 990 {
		t.Errorf("of 1000 absent ones %d are known to be absent", hidden)
	}
	for i := range j.absence.bits {
		j.absence.bits[i].Store(math.MaxUint64)
	}
	check(false)
	if _, err := j.Guarding(bg, "ci", "nobody"); !errors.Is(err, dispatch.ErrActionNotFound) {
		t.Errorf("full: %v", err)
	}
}

// Before anything guards or redirected nobody's look-up needs more than that; the first
// one is found as soon as its caller was told of it, and after a start.
func TestAbsenceOfAnything(t *testing.T) {
	contract.Covers(t, "O3", "R3")
	dir := tempDir(t)
	j := openTest(t, dir, nil)
	loaded := func() {
		t.Helper()
		for end := time.Now().Add(10 * time.Second); !j.absence.ready.Load(); {
			if time.Now().After(end) {
				t.Fatal("not loaded")
			}
			time.Sleep(time.Millisecond)
		}
	}
	loaded()
	mustAppend(t, j, toDispatch(newID(), "ci", "", "other"))
	if _, err := j.Guarding(bg, "ci", "f"); !j.absence.empty() || !errors.Is(err, dispatch.ErrActionNotFound) {
		t.Errorf("empty %v: %v", j.absence.empty(), err)
	}
	guards, redirects := newID(), newID()
	mustAppend(t, j, toDispatch(guards, "ci", "", "f"))
	mustAppend(t, j, dispatch.Batch{Action: guards, Events: []dispatch.Event{evResolved(1, unknown)}})
	if rec, err := j.Guarding(bg, "ci", "f"); err != nil || rec.ID != guards {
		t.Errorf("%v, %v", rec.ID, err)
	}
	closeTest(t, j)

	j = openTest(t, dir, nil)
	for range 2 { // loaded or not
		if rec, err := j.Guarding(bg, "ci", "f"); j.absence.empty() || err != nil || rec.ID != guards {
			t.Errorf("after a start: %v, %v", rec.ID, err)
		}
		loaded()
	}
	closeTest(t, j)

	// The same where the first one is a redirect.
	j = openTest(t, tempDir(t), nil)
	loaded()
	mustAppend(t, j, toDispatch(redirects, "ci", "", "f"))
	b := toResult(redirects, []byte("x"))
	b.Events[1].Result.RedirectTo = "https://elsewhere.example.test/"
	rec := mustAppend(t, j, b).Record
	if got, err := j.Redirecting(bg, "ci", rec.RedirectKey()); rec.RedirectKey() == "" || err != nil || got.ID != redirects {
		t.Errorf("%q: %v, %v", rec.RedirectKey(), got.ID, err)
	}
	closeTest(t, j)
	if _, err := j.Guarding(bg, "ci", "f"); err == nil || errors.Is(err, dispatch.ErrActionNotFound) {
		t.Errorf("closed: %v", err)
	}
}
