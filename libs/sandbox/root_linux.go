package sandbox

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// boxID is the uid and gid of commands, as the box sees it.
const boxID = 1000

// systemPaths are shown read-only if the host has them; links are created as links.
var systemPaths = []string{
	"/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf",
	"/etc/ld.so.conf.d", "/etc/localtime", "/etc/mime.types", "/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/nix/store", "/gnu/store",
}

var devices = []string{"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"}

var etcFiles = map[string]string{
	"/etc/passwd":        "root:x:0:0:root:/nonexistent:/bin/false\nsandbox:x:1000:1000:sandbox:/home/sandbox:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\n",
	"/etc/group":         "root:x:0:\nsandbox:x:1000:\nnogroup:x:65534:\n",
	"/etc/hosts":         "127.0.0.1 localhost sandbox\n::1 localhost\n",
	"/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}

// tree is the root of a box while it is built, below dir.
type tree struct{ dir string }

// buildRoot makes a new root from a tmpfs and read-only clones of mounts, and makes it the
// root of this mount namespace. Everything else of the host is out of reach afterwards.
func buildRoot(setup setup) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	// Sources are cloned before the tmpfs covers a folder that may contain them.
	type move struct {
		fd     int
		target string
		folder bool
	}
	var moves []move
	clone := func(source, target string, set uint64) error {
		fd, folder, err := cloneMount(source, set)
		if err == nil {
			moves = append(moves, move{fd, target, folder})
		}
		return err
	}
	const readOnly = unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV
	links := map[string]string{}
	system := systemPaths
	if setup.Network == NetworkHost {
		system = append(system[:len(system):len(system)], "/etc/resolv.conf")
	}
	for _, path := range system {
		info, err := os.Lstat(path)
		if err != nil {
			continue
		}
		if info.Mode()&os.ModeSymlink != 0 && !strings.HasPrefix(path, "/etc/") {
			if links[path], err = os.Readlink(path); err != nil {
				return err
			}
			continue
		}
		if err := clone(path, path, readOnly); err != nil {
			return err
		}
	}
	for _, path := range devices {
		if err := clone(path, path, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NOEXEC); err != nil {
			return err
		}
	}
	for i, bind := range setup.Binds {
		set := uint64(readOnly)
		if bind.Writable {
			set &^= unix.MOUNT_ATTR_RDONLY
		}
		if err := clone(bind.Source, bind.Target, set); err != nil {
			return fail(ReasonSpec, "check that it exists and that this user may read it", "binds[%d]: %s can't be shown in the box: %v", i, bind.Source, errors.Unwrap(err))
		}
	}

	t := tree{dir: "/tmp"}
	if _, err := os.Stat(t.dir); err != nil {
		t.dir = "/usr"
	}
	if err := unix.Mount("root", t.dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755,size=1m,nr_inodes=4096"); err != nil {
		return fmt.Errorf("mount the root: %w", err)
	}
	for link, to := range links {
		if err := os.Symlink(to, t.path(link)); err != nil {
			return err
		}
	}
	if err := t.data(setup.DiskBytes); err != nil {
		return err
	}
	// Before the binds are attached: a write must not reach a file of the host.
	if err := os.MkdirAll(t.path("/etc"), 0o755); err != nil {
		return err
	}
	for path, text := range etcFiles {
		if slices.ContainsFunc(setup.Binds, func(b Bind) bool { return b.Target == path }) {
			continue
		}
		if err := os.WriteFile(t.path(path), []byte(text), 0o644); err != nil {
			return err
		}
	}
	for i, m := range moves {
		if err := t.attach(m.fd, m.target, m.folder); err != nil {
			if at := i - (len(moves) - len(setup.Binds)); at >= 0 {
				return fail(ReasonSpec, "choose a target outside of read-only folders", "binds[%d]: %s can't be created in the box: %v", at, m.target, err)
			}
			return err
		}
	}
	if err := t.proc(); err != nil {
		return err
	}
	for link, to := range map[string]string{
		"/dev/fd": "/proc/self/fd", "/dev/stdin": "/proc/self/fd/0", "/dev/stdout": "/proc/self/fd/1", "/dev/stderr": "/proc/self/fd/2",
	} {
		if err := os.Symlink(to, t.path(link)); err != nil {
			return err
		}
	}
	return t.enter()
}

func (t tree) path(path string) string { return filepath.Join(t.dir, path) }

// data mounts the only memory that commands may write to: one tmpfs, whose size is the disk quota.
func (t tree) data(size int64) error {
	at := t.path("/data")
	if err := os.Mkdir(at, 0o755); err != nil {
		return err
	}
	options := fmt.Sprintf("mode=0755,uid=%d,gid=%d,size=%d,nr_inodes=%d", boxID, boxID, size, max(1024, size>>12))
	if err := unix.Mount("data", at, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
		return fmt.Errorf("mount the disk: %w", err)
	}
	for name, target := range map[string]string{"work": home, "tmp": "/tmp", "shm": "/dev/shm"} {
		dir := filepath.Join(at, name)
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
		if err := os.Chown(dir, boxID, boxID); err != nil {
			return err
		}
		fd, folder, err := cloneMount(dir, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV)
		if err != nil {
			return err
		}
		if err := t.attach(fd, target, folder); err != nil {
			return err
		}
	}
	if err := unix.Unmount(at, unix.MNT_DETACH); err != nil {
		return fmt.Errorf("unmount the disk: %w", err)
	}
	return os.Remove(at)
}

func (t tree) proc() error {
	if err := os.Mkdir(t.path("/proc"), 0o555); err != nil {
		return err
	}
	if err := unix.Mount("proc", t.path("/proc"), "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	return nil
}

// attach mounts a clone at a target, which it creates.
func (t tree) attach(fd int, target string, folder bool) error {
	defer unix.Close(fd)
	at := t.path(target)
	if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
		return err
	}
	if folder {
		if err := os.MkdirAll(at, 0o755); err != nil {
			return err
		}
	} else if f, err := os.OpenFile(at, os.O_CREATE|os.O_RDONLY, 0o644); err == nil {
		f.Close()
	} else if _, missing := os.Lstat(at); missing != nil {
		return err
	}
	if err := unix.MoveMount(fd, "", unix.AT_FDCWD, at, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("mount %s: %w", target, err)
	}
	return nil
}

// enter makes the tree the root, read-only but for the mounts in it, and detaches the host's.
func (t tree) enter() error {
	if err := unix.Chdir(t.dir); err != nil {
		return err
	}
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("change the root: %w", err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("unmount the host's root: %w", err)
	}
	if err := unix.Chdir("/"); err != nil {
		return err
	}
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}
	if err := unix.MountSetattr(unix.AT_FDCWD, "/", 0, &attr); err != nil {
		return fmt.Errorf("make the root read-only: %w", err)
	}
	return nil
}

// cloneMount returns a detached copy of the mounts at a path, with further attributes set.
func cloneMount(path string, set uint64) (fd int, folder bool, err error) {
	wrap := func(err error) error { return fmt.Errorf("clone the mounts at %s: %w", path, err) }
	info, err := os.Stat(path)
	if err != nil {
		return 0, false, wrap(err)
	}
	if fd, err = unix.OpenTree(unix.AT_FDCWD, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE); err != nil {
		return 0, false, wrap(err)
	}
	attr := unix.MountAttr{Attr_set: set}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE, &attr); err != nil {
		unix.Close(fd)
		return 0, false, wrap(err)
	}
	return fd, info.IsDir(), nil
}
