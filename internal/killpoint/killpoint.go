// Package killpoint lets a crash test end the process at a named place.
//
// The environment variable WAYBILL_KILLPOINT arms one point for the life of the
// process: "name" kills at the first pass, "name:n" at the n-th; "stop@name" stops it
// there instead (SIGSTOP), until somebody sends SIGCONT. The process that is killed
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
}

var armed atomic.Pointer[point]

func init() { armed.Store(parse(os.Getenv(Variable))) }

// parse reads "name" or "name:n"; anything else arms nothing.
func parse(s string) *point {
	s, halt := strings.CutPrefix(s, "stop@")
	name, count, hasCount := strings.Cut(s, ":")
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
	p := &point{name: name, stop: halt}
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
	if p == nil || p.name != name {
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

// Armed reports whether the point name is armed, so that code which does two
// things side by side can do them one after the other and make the point between
// them a certain one.
func Armed(name string) bool {
	p := armed.Load()
	return p != nil && p.name == name
}
