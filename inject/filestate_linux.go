package inject

import (
	"io/fs"
	"syscall"
	"time"
)

// fileState tells one content of a file from another without reading it.
type fileState struct {
	device, inode uint64
	size          int64
	mode          fs.FileMode
	modified      syscall.Timespec
	changed       syscall.Timespec // of the inode: also by those who set the times back
}

func stateOf(info fs.FileInfo) fileState {
	s := fileState{size: info.Size(), mode: info.Mode()}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		s.device, s.inode, s.modified, s.changed = uint64(st.Dev), st.Ino, st.Mtim, st.Ctim
	}
	return s
}

// settled reports whether the last change was long enough before at for a further one
// to show.
func (s fileState) settled(at time.Time) bool {
	return s.inode != 0 && at.Sub(time.Unix(s.changed.Unix())) > rest && at.Sub(time.Unix(s.modified.Unix())) > rest
}
