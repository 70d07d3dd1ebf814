package servertest

import "syscall"

// dieWithParent makes the kernel kill the server when the test's process dies, also after a timeout
// or a SIGKILL.
func dieWithParent() *syscall.SysProcAttr { return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} }
