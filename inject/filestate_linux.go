package inject

import (
	"errors"
	"io/fs"
	"syscall"
	"time"
)

// fileState tells one content of a file from another without reading it.
type fileState struct {
	device, inode uint64
	size          int64
	mode          uint32
	modified      syscall.Timespec
	changed       syscall.Timespec // of the inode: also by those who set the times back
}

func stateOf(info fs.FileInfo) fileState {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return stateIn(st)
	}
	return fileState{size: info.Size(), mode: uint32(info.Mode())} // which never settles
}

func stateIn(st *syscall.Stat_t) fileState {
	return fileState{device: uint64(st.Dev), inode: st.Ino, size: st.Size, mode: st.Mode, modified: st.Mtim, changed: st.Ctim}
}

// stateAt asks for the state of the file at path, links followed, as os.Stat does; it is
// asked with each request.
func stateAt(path string) (fileState, error) {
	var st syscall.Stat_t
	for {
		switch err := syscall.Stat(path, &st); {
		case err == nil:
			return stateIn(&st), nil
		case !errors.Is(err, syscall.EINTR):
			return fileState{}, err
		}
	}
}

// settled reports whether the last change was long enough before at for a further one
// to show.
func (s fileState) settled(at time.Time) bool {
	return s.inode != 0 && at.Sub(time.Unix(s.changed.Unix())) > rest && at.Sub(time.Unix(s.modified.Unix())) > rest
}
