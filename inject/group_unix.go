//go:build unix

package inject

import (
	"os/exec"
	"syscall"
)

// ownGroup makes the program the leader of a group that is ended as a whole.
func ownGroup(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
}
