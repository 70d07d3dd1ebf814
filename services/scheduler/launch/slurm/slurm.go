// Package slurm starts workers as batch jobs of a Slurm cluster whose nodes share the files of the
// scheduler.
//
// A worker is one job. The launcher submits a script that it writes next to the log of the worker,
// and asks squeue for the states of all its jobs. A job is identified by a nonce in its comment,
// because slurmctld uses the id of a job again that it has lost. The script writes how the worker
// ended into a file. It also stops the worker when the launcher has not written its beat for the
// grace period, so that no job outlives its scheduler.
//
//	Launch --> queued --RUNNING--> running --exit file, final state, unknown to Slurm--> exited
//	              |                   |
//	              +---- Release ------+--> no beat --Adopt--> as before
//	                                         +--grace period--> the script stops the worker
package slurm

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/rollout-rl/rollout/libs/atomicfile"
	"github.com/rollout-rl/rollout/libs/wait"
	"github.com/rollout-rl/rollout/services/scheduler/launch"
)

// Name is the name of this launcher in configurations and handles.
const Name = "slurm"

const (
	// DefaultGrace is how long a worker without an owner runs: the time in which another scheduler
	// takes the lease and adopts it.
	DefaultGrace = 60 * time.Second
	// callTimeout bounds a call of a command of Slurm.
	callTimeout = 30 * time.Second
	// DefaultPoll is the interval between two questions about the states of jobs.
	DefaultPoll = time.Second
	// lostAfter is the number of answers without a job after which it is lost.
	lostAfter = 5
	// stopAgain is the number of polls between two requests to end a job that should stop.
	stopAgain = 5
	// stopMargin is how much longer than its grace period a script may take to end its worker.
	stopMargin = 30 * time.Second
	// lastBytes bounds what is read of a log.
	lastBytes = 256 << 10
	mark      = "rollout:" // before the nonce in the comment of a job
)

// Resources are what the job of a worker asks for. Empty fields are left to the cluster.
type Resources struct {
	Partition string
	Account   string
	TimeLimit string // as for sbatch --time
	CPUs      int    // of the worker
	GPUs      int
	Memory    string   // of the node, as for sbatch --mem
	Options   []string // more arguments of sbatch
	// Notice is how long before the time limit the worker is asked to finish, in seconds. 0: 60
	Notice int
}

// arguments are those of sbatch.
func (r Resources) arguments() []string {
	var out []string
	for _, option := range []struct{ name, value string }{
		{"partition", r.Partition}, {"account", r.Account}, {"time", r.TimeLimit}, {"mem", r.Memory},
		{"cpus-per-task", number(r.CPUs)}, {"gpus", number(r.GPUs)},
	} {
		if option.value != "" {
			out = append(out, "--"+option.name+"="+option.value)
		}
	}
	return append(out, r.Options...)
}

func number(n int) string {
	if n == 0 {
		return ""
	}
	return strconv.Itoa(n)
}

// Launcher implements launch.Keeper. Make it with New.
type Launcher struct {
	resources map[string]Resources // by kind of worker
	grace     time.Duration
	poll      time.Duration
	call      func(command string, args ...string) (string, error) // of Slurm

	mu   sync.Mutex
	jobs map[string]*process // by nonce
	asks bool                // a goroutine asks for their states
}

// New makes a launcher for workers of these kinds. grace and poll may be 0, for the defaults.
func New(resources map[string]Resources, grace, poll time.Duration) *Launcher {
	return &Launcher{resources: resources, grace: cmp.Or(grace, DefaultGrace), poll: cmp.Or(poll, DefaultPoll), call: run, jobs: map[string]*process{}}
}

// Launch implements launch.Launcher. The process is launch.Queued.
func (l *Launcher) Launch(c launch.Command) (launch.Process, error) {
	if len(c.Args) == 0 {
		return nil, errors.New("no worker command is configured")
	}
	log, err := os.OpenFile(c.Log, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the log of the worker: %w", err)
	}
	offset, err := log.Seek(0, 2)
	if err = errors.Join(err, log.Close()); err != nil {
		return nil, fmt.Errorf("open the log of the worker: %w", err)
	}
	p := l.process(strings.TrimSuffix(c.Log, ".log")+"."+rand.Text()[:12], c.Log, offset)
	if err := p.write(c); err != nil {
		p.forget()
		return nil, err
	}
	r := l.resources[c.Kind]
	notice := cmp.Or(r.Notice, 60)
	arguments := append([]string{
		"--parsable", "--job-name=rollout-" + c.Worker, "--comment=" + mark + p.nonce, "--output=" + c.Log, "--error=" + c.Log, "--open-mode=append",
		"--export=NONE", "--no-requeue", "--ntasks=1", "--signal=B:TERM@" + strconv.Itoa(notice), "--chdir=" + filepath.Dir(c.Log),
	}, r.arguments()...)
	text, err := l.call("sbatch", append(arguments, p.base+".sh")...)
	p.job, _, _ = strings.Cut(strings.TrimSpace(text), ";")
	if err != nil { // the answer may be lost, and not the job
		states, asked := l.ask()
		found, known := states[p.nonce]
		if asked != nil || !known {
			p.forget() // a job that starts later refuses without its beat
			return nil, fmt.Errorf("submit the job of %s: %w", c.Worker, err)
		}
		p.job = found.job
	}
	return l.own(p, c.Keep), nil
}

// Adopt implements launch.Keeper. The handle is slurm:JOB:OFFSET:BASE, where the nonce is the end
// of the base.
func (l *Launcher) Adopt(handle string) (launch.Process, error) {
	parts := strings.SplitN(handle, ":", 4)
	if len(parts) != 4 || parts[0] != Name {
		return nil, launch.ErrGone
	}
	offset, err := strconv.ParseInt(parts[2], 10, 64)
	if err != nil {
		return nil, launch.ErrGone
	}
	base := parts[3]
	p := l.process(base, strings.TrimSuffix(base, filepath.Ext(base))+".log", offset)
	p.job = parts[1]
	states, err := l.ask()
	if err != nil {
		return nil, fmt.Errorf("%w: %w", launch.ErrGone, err)
	}
	found := states[p.nonce]
	if _, ended := p.ended(); !found.running() && !found.queued() && !ended {
		return nil, fmt.Errorf("%w: Slurm has no such job that runs or waits", launch.ErrGone)
	}
	if err := p.beat(); err != nil {
		return nil, fmt.Errorf("%w: %w", launch.ErrGone, err)
	}
	if found.running() {
		p.begin()
	}
	return l.own(p, true), nil
}

// own follows a process.
func (l *Launcher) own(p *process, keep bool) launch.Process {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.jobs[p.nonce] = p
	if !l.asks {
		l.asks = true
		go l.follow()
	}
	if keep {
		return kept{p}
	}
	return p
}

// follow asks for the states of the jobs as long as it has any.
func (l *Launcher) follow() {
	tick := time.NewTicker(l.poll)
	defer tick.Stop()
	for {
		<-tick.C
		states, err := l.ask()
		l.mu.Lock()
		for nonce, p := range l.jobs {
			found, known := states[nonce]
			if p.update(found, known, err) {
				delete(l.jobs, nonce)
				continue
			}
			if p.unanswered(found) {
				go p.cancel(!time.Now().Before(p.deadline))
			}
		}
		if l.asks = len(l.jobs) > 0; !l.asks {
			l.mu.Unlock()
			return
		}
		l.mu.Unlock()
	}
}

// state is what squeue says of a job.
type state struct{ job, name, reason string }

func (s state) running() bool {
	switch s.name {
	case "RUNNING", "COMPLETING", "STOPPED", "SUSPENDED", "SIGNALING", "STAGE_OUT":
		return true
	}
	return false
}

func (s state) queued() bool {
	switch s.name {
	case "PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "RESIZING", "SPECIAL_EXIT":
		return true
	}
	return false
}

// left reports that Slurm, and not the worker, ended a job in its final state.
func (s state) left() bool {
	switch s.name {
	case "PREEMPTED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "REVOKED", "CANCELLED", "DEADLINE":
		return true
	}
	return false
}

// ask returns the states of all jobs of this user that have a nonce, by nonce.
func (l *Launcher) ask() (map[string]state, error) {
	text, err := l.call("squeue", "--me", "--noheader", "--states=all", "--format=%i|%T|%k|%r")
	if err != nil {
		return nil, err
	}
	return parse(text), nil
}

func parse(text string) map[string]state {
	out := map[string]state{}
	for line := range strings.Lines(text) {
		fields := strings.SplitN(strings.TrimSpace(line), "|", 4)
		if len(fields) != 4 {
			continue
		}
		if nonce, ours := strings.CutPrefix(fields[2], mark); ours {
			out[nonce] = state{job: fields[0], name: fields[1], reason: fields[3]}
		}
	}
	return out
}

// run calls a command of Slurm. The error has what it printed.
func run(name string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.WaitDelay = time.Second
	var said strings.Builder
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		return string(out), fmt.Errorf("%s: %w: %s", name, err, strings.Join(strings.Fields(said.String()), " "))
	}
	return string(out), nil
}

// process is one job.
type process struct {
	job, nonce  string
	base        string // of its files
	log         string
	offset      int64 // of its output in the log
	owner       *Launcher
	awaits      chan launch.Awaited
	began, done chan struct{}
	begin       func()
	stop        sync.Once

	// Of the goroutine that follows the jobs, with the lock of the launcher.
	awaited  launch.Awaited
	missing  int
	beats    time.Time
	stopping bool      // Stop was called
	deadline time.Time // when stopping: the end of the grace period of Stop
	again    time.Time // when stopping: of the next request
	released bool
	exit     launch.Exit
}

func (l *Launcher) process(base, log string, offset int64) *process {
	p := &process{
		nonce: strings.TrimPrefix(filepath.Ext(base), "."), base: base, log: log, offset: offset, owner: l,
		awaits: make(chan launch.Awaited, 1), began: make(chan struct{}), done: make(chan struct{}),
	}
	p.begin = sync.OnceFunc(func() { close(p.began) })
	return p
}

// beat tells the script that the job has an owner.
func (p *process) beat() error {
	p.beats = time.Now()
	return atomicfile.Write(p.base+".beat", []byte(rand.Text()+"\n"), 0o600)
}

// update applies an answer of squeue. It returns true when nothing has to be followed any more.
func (p *process) update(s state, known bool, err error) (over bool) {
	if p.released {
		return true
	}
	switch now := time.Now(); {
	case p.stopping && !now.Before(p.deadline):
		_ = os.Remove(p.base + ".beat") // the script stops the worker if Slurm does not; a job that starts now refuses
	case now.Sub(p.beats) >= p.owner.grace/6:
		_ = p.beat() // it is tried again in the next round
	}
	if exit, ended := p.ended(); ended {
		p.end(exit)
		return true
	}
	switch {
	case err != nil && p.stopping && time.Since(p.deadline) >= p.owner.grace+stopMargin:
		p.end(launch.Exit{Code: -1, Signal: syscall.SIGKILL.String(), LastLines: p.lines()}) // by its script, at the latest
		return true
	case err != nil:
		p.await("Slurm does not answer: " + err.Error())
	case !known:
		if p.missing++; p.missing < lostAfter {
			return false
		}
		exit := launch.Exit{Code: -1, LastLines: p.lines()}
		switch lost := fmt.Sprintf("Slurm does not know its job %s any more", p.job); {
		case p.stopping:
			exit.Signal = syscall.SIGKILL.String()
		case p.hasBegun():
			exit.Left = "was lost: " + lost
		default: // a crash, because it may be so for each job
			exit.NotStarted = lost
		}
		p.end(exit)
		return true
	case s.running():
		p.missing = 0
		p.begin()
	case s.queued():
		p.missing = 0
		p.await(fmt.Sprintf("job %s is %s: %s", p.job, s.name, s.reason))
	default:
		if p.missing++; p.missing < 2 { // the file may be visible later than the state
			return false
		}
		exit := launch.Exit{Code: -1, LastLines: p.lines(), Left: fmt.Sprintf("was ended by Slurm: job %s is %s", p.job, s.name)}
		switch {
		case p.stopping:
			exit.Left, exit.Signal = "", syscall.SIGKILL.String()
		case !s.left():
			exit.Left = ""
			if !p.hasBegun() {
				exit.NotStarted = fmt.Sprintf("job %s is %s (%s)", p.job, s.name, s.reason)
			}
		}
		p.end(exit)
		return true
	}
	return false
}

// await reports what a job waits for, if that has changed.
func (p *process) await(detail string) {
	what := launch.Awaited{
		Owner: wait.User, Reason: wait.WorkerAwaited, What: "Slurm job", Detail: detail,
		Fix: "see `squeue --me`; a job starts when the cluster has room for what [launch] asks for",
	}
	if what == p.awaited {
		return
	}
	p.awaited = what
	select {
	case <-p.awaits:
	default:
	}
	p.awaits <- what
}

// ended reads how the script says that the worker has ended: "CODE ASKED", where ASKED is 1 if
// Slurm asked it to stop, or "refused TEXT".
func (p *process) ended() (launch.Exit, bool) {
	text, err := os.ReadFile(p.base + ".exit")
	if err != nil || !strings.HasSuffix(string(text), "\n") {
		return launch.Exit{}, false
	}
	first, rest, _ := strings.Cut(strings.TrimSpace(string(text)), " ")
	exit := launch.Exit{Code: -1, LastLines: p.lines()}
	code, err := strconv.Atoi(first)
	switch {
	case err != nil:
		exit.NotStarted = rest
		return exit, true
	case code > 128 && code <= 128+64:
		exit.Signal = syscall.Signal(code - 128).String()
	default:
		exit.Code = code
	}
	if rest == "1" && !p.stopping {
		exit.Left = fmt.Sprintf("was asked to stop by Slurm: job %s was cancelled, is preempted, or reaches its time limit", p.job)
	}
	return exit, true
}

// lines are the last lines of its output.
func (p *process) lines() []string {
	file, err := os.Open(p.log)
	if err != nil {
		return nil
	}
	defer file.Close()
	size, err := file.Seek(0, io.SeekEnd)
	if err != nil || size <= p.offset {
		return nil
	}
	from := max(p.offset, size-lastBytes)
	text, err := io.ReadAll(io.NewSectionReader(file, from, size-from))
	if err != nil {
		return nil
	}
	lines := strings.Split(strings.ToValidUTF8(strings.TrimSuffix(string(text), "\n"), "?"), "\n")
	if from > p.offset && len(lines) > 1 {
		lines = lines[1:] // it is incomplete
	}
	return lines[max(0, len(lines)-launch.LastLines):]
}

// end records the exit, and removes the files of the job.
func (p *process) end(exit launch.Exit) {
	p.exit = exit
	p.forget()
	close(p.done)
}

func (p *process) forget() {
	for _, extension := range []string{".sh", ".env", ".beat", ".exit"} {
		_ = os.Remove(p.base + extension) // files that are left are deleted with the run
	}
}

func (p *process) ID() string                    { return Name + "-" + p.job + "-" + p.nonce }
func (p *process) Began() <-chan struct{}        { return p.began }
func (p *process) Awaits() <-chan launch.Awaited { return p.awaits }
func (p *process) Done() <-chan struct{}         { return p.done }

func (p *process) Exit() launch.Exit {
	<-p.done
	return p.exit
}

func (p *process) hasBegun() bool {
	select {
	case <-p.began:
		return true
	default:
		return false
	}
}

// Stop implements launch.Process. While Slurm does not answer, the job is not cancelled. Then its
// script stops the worker, which has no beat after the grace period.
func (p *process) Stop(grace time.Duration) {
	p.stop.Do(func() {
		now := time.Now()
		p.owner.mu.Lock()
		p.stopping, p.deadline, p.again = true, now.Add(grace), now.Add(stopAgain*p.owner.poll)
		p.owner.mu.Unlock()
		p.cancel(false)
		timer := time.NewTimer(time.Until(now.Add(grace)))
		defer timer.Stop()
		select {
		case <-p.done:
		case <-timer.C:
			p.cancel(true)
		}
	})
	<-p.done
}

// cancel requests the end of the job: it asks the worker to finish, or ends the job at once if kill
// is set or the job waits. Errors are ignored, because the request is repeated, and a job that has
// ended is found by its state.
func (p *process) cancel(kill bool) {
	if p.hasBegun() {
		if !kill {
			_, _ = p.owner.call("scancel", "--batch", "--signal=USR2", p.job)
			return
		}
		_, _ = p.owner.call("scancel", "--full", "--signal=KILL", p.job)
	}
	_, _ = p.owner.call("scancel", p.job) // also of a job that is about to start
}

// unanswered reports, once in a while, that a job in this state should have stopped: slurmctld may
// not have got the request.
func (p *process) unanswered(s state) bool {
	if now := time.Now(); p.stopping && now.After(p.again) && (s.running() || s.queued()) {
		p.again = now.Add(stopAgain * p.owner.poll)
		return true
	}
	return false
}

// kept is a process that can outlive its scheduler.
type kept struct{ *process }

// Handle implements launch.Kept.
func (k kept) Handle() string {
	return strings.Join([]string{Name, k.job, strconv.FormatInt(k.offset, 10), k.base}, ":")
}

// Release implements launch.Kept. The script stops the worker after the grace period of the
// launcher, which is longer than the wanted one.
func (k kept) Release(time.Duration) {
	k.owner.mu.Lock()
	defer k.owner.mu.Unlock()
	k.released = true
	delete(k.owner.jobs, k.nonce)
}
