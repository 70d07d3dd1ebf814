package sqldbtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/rollout-rl/rollout/libs/freeport"
)

// Server is a PostgreSQL server of a test.
type Server struct {
	URL  string // of a superuser, without a password, because the server listens only on loopback
	Data string
	Port int

	bin   string
	home  string // folder of Data and of standbys
	cmd   *exec.Cmd
	log   *bytes.Buffer // complete after the server ended
	ended chan struct{}
	held  io.Closer // the cleaner's input; the kernel closes it when this process ends
}

const startLimit = 60 * time.Second

// shared is the server of this process. It ends with it, by the kernel.
var shared = sync.OnceValues(Start)

// Start makes a database folder and starts a server on a free port; both go when the process ends.
// As root it runs as the user postgres, because the server refuses to be root.
func Start() (*Server, error) {
	bin, err := binaries()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "rollout-postgres-") // outside of the test's folder, which other users can't read
	if err != nil {
		return nil, err
	}
	s := &Server{bin: bin, home: dir, Data: filepath.Join(dir, "data")}
	if os.Getuid() == 0 {
		u, err := account()
		if err != nil {
			return nil, err
		}
		if err := os.Chown(dir, u.uid, u.gid); err != nil {
			return nil, err
		}
	}
	initdb := s.command("initdb", "-D", s.Data, "-U", "rollout", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8", "--no-sync")
	if out, err := initdb.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("initdb: %w\n%s", err, out)
	}
	if err := s.listen(); err != nil {
		return nil, err
	}
	if err := s.Run(); err != nil {
		return nil, err
	}
	return s, s.cleanAfter(dir)
}

// listen chooses a port.
func (s *Server) listen() error {
	ports, err := freeport.Take(1)
	if err != nil {
		return err
	}
	s.Port = ports[0]
	s.URL = fmt.Sprintf("postgres://rollout@127.0.0.1:%d/postgres?sslmode=disable", s.Port)
	return nil
}

// Standby starts a replica with the given name, without which this server commits nothing
// (synchronous replication), and returns when it streams. It ends with the process.
func (s *Server) Standby(ctx context.Context, name string) (*Server, error) {
	standby := &Server{bin: s.bin, home: s.home, Data: filepath.Join(s.home, name)}
	copied := s.command("pg_basebackup", "-D", standby.Data, "-R", "-X", "stream", "-c", "fast", "--no-sync",
		"-d", fmt.Sprintf("host=127.0.0.1 port=%d user=rollout application_name=%s", s.Port, name))
	if out, err := copied.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("pg_basebackup: %w\n%s", err, out)
	}
	if err := standby.listen(); err != nil {
		return nil, err
	}
	if err := standby.Run(); err != nil {
		return nil, err
	}
	if err := standby.cleanAfter(""); err != nil {
		return nil, err
	}
	conn, err := pgx.Connect(ctx, s.URL)
	if err != nil {
		return nil, err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	if err := s.Exec(ctx, "ALTER SYSTEM SET synchronous_standby_names = '"+name+"'", "SELECT pg_reload_conf()"); err != nil {
		return nil, err
	}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		var ready bool
		if err := conn.QueryRow(ctx, "SELECT count(*) = 1 FROM pg_stat_replication WHERE sync_state = 'sync' AND state = 'streaming'").Scan(&ready); err != nil || ready {
			return standby, err
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-tick.C:
		}
	}
}

// Promote makes a standby a server that accepts writes, alone.
func (s *Server) Promote(ctx context.Context) error {
	return s.Exec(ctx, "SELECT pg_promote()", "ALTER SYSTEM SET synchronous_standby_names = ''", "SELECT pg_reload_conf()")
}

// Exec runs statements as the superuser.
func (s *Server) Exec(ctx context.Context, statements ...string) error {
	conn, err := pgx.Connect(ctx, s.URL)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	for _, statement := range statements {
		if _, err := conn.Exec(ctx, statement); err != nil {
			return fmt.Errorf("%s: %w", statement, err)
		}
	}
	return nil
}

// Run starts the server on its folder, also after Kill, and returns when it answers.
func (s *Server) Run() error {
	s.log, s.ended = &bytes.Buffer{}, make(chan struct{})
	s.cmd = s.command("postgres", "-D", s.Data, "-p", strconv.Itoa(s.Port), "-c", "listen_addresses=127.0.0.1",
		"-c", "unix_socket_directories=", "-c", "fsync=off", "-c", "max_connections=400", "-c", "shared_buffers=32MB")
	s.cmd.Stdout, s.cmd.Stderr = s.log, s.log
	s.cmd.SysProcAttr.Setpgid = true
	if err := s.cmd.Start(); err != nil {
		return fmt.Errorf("start PostgreSQL: %w", err)
	}
	go func() { defer close(s.ended); _ = s.cmd.Wait() }()
	ctx, cancel := context.WithTimeout(context.Background(), startLimit)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		conn, err := pgx.Connect(ctx, s.URL)
		if err == nil {
			return conn.Close(ctx)
		}
		select {
		case <-s.ended:
			return fmt.Errorf("PostgreSQL left at its start:\n%s", s.log)
		case <-ctx.Done():
			return errors.Join(err, ctx.Err())
		case <-tick.C:
		}
	}
}

// Kill ends the server like a crash: nothing is flushed, and connections break.
func (s *Server) Kill() {
	_ = s.cmd.Process.Signal(syscall.SIGQUIT)
	<-s.ended
}

// cleanAfter starts a process that waits for the end of this one, however it ends, then stops the
// server and removes the folder, unless it is "".
func (s *Server) cleanAfter(dir string) error {
	cleaner := exec.Command("sh", "-c",
		`cat >/dev/null; kill -INT "$(head -n 1 "$0/postmaster.pid")" 2>/dev/null; while [ -e "$0/postmaster.pid" ]; do sleep 0.1; done; [ -z "$1" ] || rm -rf "$1"`,
		s.Data, dir)
	cleaner.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	var err error
	if s.held, err = cleaner.StdinPipe(); err != nil {
		return err
	}
	if err := cleaner.Start(); err != nil {
		return err
	}
	go func() { _ = cleaner.Wait() }()
	return nil
}

// command runs a program as an ordinary user.
func (s *Server) command(name string, args ...string) *exec.Cmd {
	cmd := exec.Command(filepath.Join(s.bin, name), args...)
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{}
	if u, err := account(); err == nil && os.Getuid() == 0 {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(u.uid), Gid: uint32(u.gid)}
	}
	return cmd
}

type ids struct{ uid, gid int }

func account() (ids, error) {
	u, err := user.Lookup("postgres")
	if err != nil {
		return ids{}, fmt.Errorf("PostgreSQL refuses to run as root, and there is no user postgres: %w", err)
	}
	uid, err := strconv.Atoi(u.Uid)
	if err != nil {
		return ids{}, err
	}
	gid, err := strconv.Atoi(u.Gid)
	return ids{uid, gid}, err
}

// binaries finds the newest installed PostgreSQL.
func binaries() (string, error) {
	found, _ := filepath.Glob("/usr/lib/postgresql/*/bin/postgres")
	slices.SortFunc(found, func(a, b string) int { return version(b) - version(a) })
	if len(found) > 0 {
		return filepath.Dir(found[0]), nil
	}
	if path, err := exec.LookPath("postgres"); err == nil {
		return filepath.Dir(path), nil
	}
	return "", errors.New("not installed: no /usr/lib/postgresql/*/bin/postgres and no postgres on PATH; " +
		"install it (apt-get install postgresql), or let make check-servers do so as root")
}

func version(path string) int {
	n, _ := strconv.Atoi(filepath.Base(filepath.Dir(filepath.Dir(path))))
	return n
}
