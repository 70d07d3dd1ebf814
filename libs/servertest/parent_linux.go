package servertest

import "syscall"

// dieWithParent has the kernel end the server when the test's process dies, also by a timeout or a
// SIGKILL.
func dieWithParent() *syscall.SysProcAttr { return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} }
