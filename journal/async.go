package journal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// asyncWrites hands writes over to the kernel, which says when they are durable (Linux AIO,
// io_submit(2)). A goroutine that waits for that holds no thread: of one that is in fdatasync
// the scheduler has to take the processor away and to bring it back, for every group. That
// costs more than the call; where nobody else has work, it is the other way round.
//
// One goroutine at a time.
type asyncWrites struct {
	context uintptr // the kernel's; aio_context_t
	event   *os.File
	ready   syscall.RawConn // of event, to wait with the runtime's poller
	fd      uint32          // of event

	block  ioControlBlock
	blocks [1]*ioControlBlock
	done   [1]ioEvent
}

// ioControlBlock is struct iocb of linux/aio_abi.h, as it is where the lower half of a word
// comes first: all that Waybill is built for.
type ioControlBlock struct {
	_              uint64 // data, given back
	_              uint32 // key, the kernel's
	writeFlags     uint32
	operation      uint16
	_              int16 // priority
	file           uint32
	buffer, length uint64
	offset         int64
	_              uint64
	flags, event   uint32
}

// ioEvent is struct io_event of linux/aio_abi.h.
type ioEvent struct {
	data, block uint64
	result      int64 // bytes, or a negated errno
	_           int64
}

const (
	operationPwrite = 1 // IOCB_CMD_PWRITE
	flagEvent       = 1 // IOCB_FLAG_RESFD
)

// errNoAsync: nothing was handed over; this kernel, its file system, or who started the
// process wants no such writes.
var errNoAsync = errors.New("journal: no asynchronous writes")

// newAsyncWrites returns nil where there are none.
func newAsyncWrites() *asyncWrites {
	if binary.NativeEndian.Uint16([]byte{1, 0}) != 1 {
		return nil // the flag that makes a write durable would stand where it is ignored
	}
	a := &asyncWrites{}
	if _, _, errno := unix.Syscall(unix.SYS_IO_SETUP, 1, uintptr(unsafe.Pointer(&a.context)), 0); errno != 0 {
		return nil
	}
	fd, err := unix.Eventfd(0, unix.EFD_NONBLOCK|unix.EFD_CLOEXEC)
	if err != nil {
		a.close()
		return nil
	}
	a.fd, a.event = uint32(fd), os.NewFile(uintptr(fd), "eventfd")
	if a.ready, err = a.event.SyscallConn(); err != nil || a.event.SetReadDeadline(time.Time{}) != nil {
		a.close() // not in the poller
		return nil
	}
	return a
}

// write writes b to f at an offset and returns when it is durable, as after fdatasync. f is
// open for direct writes, and b and the offset are as it wants them; b is not on the heap. An
// error other than errNoAsync leaves open what was written.
func (a *asyncWrites) write(f *os.File, b []byte, offset int64) error {
	a.block = ioControlBlock{
		writeFlags: unix.RWF_DSYNC, operation: operationPwrite, file: uint32(f.Fd()),
		buffer: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))), length: uint64(len(b)), offset: offset,
		flags: flagEvent, event: a.fd,
	}
	a.blocks[0] = &a.block
	begun := false
	var failed error
	// The poller tells of changes only: what it told before is forgotten first, and then the
	// write begins.
	err := a.ready.Read(func(uintptr) bool {
		if !begun {
			begun = true
			failed = a.submit()
			return failed != nil
		}
		var ended bool
		ended, failed = a.ended(len(b))
		return ended
	})
	return errors.Join(failed, err)
}

func (a *asyncWrites) submit() error {
	n, _, errno := unix.Syscall(unix.SYS_IO_SUBMIT, a.context, 1, uintptr(unsafe.Pointer(&a.blocks[0])))
	switch errno {
	case 0:
		if n != 1 {
			return fmt.Errorf("%w: none was taken", errNoAsync)
		}
		return nil
	case unix.EAGAIN, unix.ENOSYS, unix.EINVAL, unix.EOPNOTSUPP, unix.EPERM, unix.EACCES:
		// What io_submit returns itself was not begun; afterwards errors are in the event.
		return fmt.Errorf("%w: %w", errNoAsync, errno)
	default:
		return os.NewSyscallError("io_submit", errno)
	}
}

// ended reports whether the write has ended, and how.
func (a *asyncWrites) ended(length int) (bool, error) {
	var now unix.Timespec
	for {
		n, _, errno := unix.Syscall6(unix.SYS_IO_GETEVENTS, a.context, 0, 1, uintptr(unsafe.Pointer(&a.done[0])), uintptr(unsafe.Pointer(&now)), 0)
		switch {
		case errno == unix.EINTR:
			continue
		case errno != 0:
			return true, os.NewSyscallError("io_getevents", errno)
		case n == 0:
			return false, nil
		}
		switch r := a.done[0].result; {
		case r < 0:
			return true, os.NewSyscallError("write", unix.Errno(-r))
		case r != int64(length):
			return true, io.ErrShortWrite
		default:
			return true, nil
		}
	}
}

// close waits for a write that goes on.
func (a *asyncWrites) close() {
	_, _, _ = unix.Syscall(unix.SYS_IO_DESTROY, a.context, 0, 0)
	if a.event != nil {
		_ = a.event.Close()
	}
}
