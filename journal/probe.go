package journal

// CheckFilesystem wraps ErrFilesystem when a journal in dir would be refused: on its
// file system a completed sync is no promise. dir must exist.
func CheckFilesystem(dir string) error { return checkFilesystem(dir) }

// FreeBytes is what an unprivileged process may still allocate where dir is.
func FreeBytes(dir string) (int64, error) { return freeBytes(dir) }

// SpaceReserve is the free space below which an empty journal admits no new work.
const SpaceReserve int64 = spaceReserve
