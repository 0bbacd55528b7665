// Package killpoint lets a crash test end the process at a named place.
//
// The environment variable WAYBILL_KILLPOINT arms one point for the life of the
// process: "name" kills at the first pass, "name:n" at the n-th, "first>name" at the
// first one after a pass of the point first; "stop@name" stops it there instead
// (SIGSTOP), until somebody sends SIGCONT. The process that is killed
// gets SIGKILL, as from outside: no deferred call, no flush, no signal handler
// runs (CONTRACT T2). Unset, every call is one atomic load.
//
// It is compiled into the shipped binary so that the binary under test is the one
// that is shipped. Whoever can set a process's environment can kill it anyway.
package killpoint

import (
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
)

// Variable is the name of the environment variable that arms a point.
const Variable = "WAYBILL_KILLPOINT"

type point struct {
	name string
	left atomic.Int64
	stop bool
	// first is what must be passed before; "": nothing.
	first string
	begun atomic.Bool
}

var armed atomic.Pointer[point]

func init() { armed.Store(parse(os.Getenv(Variable))) }

// parse reads what the variable holds; what is none of its forms arms nothing.
func parse(s string) *point {
	s, halt := strings.CutPrefix(s, "stop@")
	first, rest, ordered := strings.Cut(s, ">")
	if !ordered {
		first, rest = "", s
	} else if first == "" {
		return nil
	}
	name, count, hasCount := strings.Cut(rest, ":")
	n := int64(1)
	if hasCount {
		var err error
		if n, err = strconv.ParseInt(count, 10, 64); err != nil {
			return nil
		}
	}
	if name == "" || n < 1 {
		return nil
	}
	p := &point{name: name, stop: halt, first: first}
	p.left.Store(n)
	return p
}

// kill is replaced by this package's tests.
var kill = func() {
	_ = syscall.Kill(syscall.Getpid(), syscall.SIGKILL)
	select {} // the signal is on its way: nothing after this point may run
}

// stop stops the process; it goes on behind it.
var stop = func() { _ = syscall.Kill(syscall.Getpid(), syscall.SIGSTOP) }

// At kills the process when the point name is armed and its count is reached.
func At(name string) {
	p := armed.Load()
	if p == nil {
		return
	}
	if p.first != "" && p.first == name {
		p.begun.Store(true)
	}
	if p.name != name || p.first != "" && !p.begun.Load() {
		return
	}
	if p.left.Add(-1) != 0 {
		return
	}
	if p.stop {
		stop()
		return
	}
	kill()
}
