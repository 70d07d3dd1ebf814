package segment

import (
	"os"
	"strings"
	"sync"
)

// BootID names the kernel that this process runs on since it was started; "" where the system has no such name.
var BootID = sync.OnceValue(func() string {
	text, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(text))
})
