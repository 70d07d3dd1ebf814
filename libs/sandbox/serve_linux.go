package sandbox

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// Serve answers the requests of one client until its input ends or the context is done. It closes
// every box before it returns.
func Serve(ctx context.Context, h *Host, in io.Reader, out io.Writer) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s := &server{
		ctx: ctx, host: h, out: bufio.NewWriter(out), pool: &pool{host: h, ctx: ctx, stocks: map[string]*stock{}},
		boxes: map[string]*openBox{}, processes: map[string]*stream{}, calls: map[int64]context.CancelFunc{},
	}
	failed := make(chan error, 1)
	go func() {
		in := bufio.NewReader(in)
		for {
			var r Request
			if err := readFrame(in, &r); err != nil {
				failed <- err
				return
			}
			call, done := s.begin(r.ID)
			s.work.Go(func() {
				defer done()
				s.reply(call, r)
			})
		}
	}()
	var err error
	select {
	case <-ctx.Done():
	case err = <-failed:
		if errors.Is(err, io.EOF) {
			err = nil
		}
	}
	cancel()
	s.close()
	return err
}

// server is the state of Serve.
type server struct {
	ctx  context.Context
	host *Host
	pool *pool
	work sync.WaitGroup

	writing sync.Mutex
	out     *bufio.Writer

	mu        sync.Mutex
	sequence  int
	boxes     map[string]*openBox
	processes map[string]*stream
	calls     map[int64]context.CancelFunc
}

// openBox is a box that a client keeps.
type openBox struct {
	id   string
	spec Spec
	*readyBox
}

// stream is a started process whose output comes as events.
type stream struct {
	*Process
	box     string
	writing sync.Mutex
}

func (s *server) begin(id int64) (context.Context, func()) {
	ctx, cancel := context.WithCancel(s.ctx)
	s.mu.Lock()
	s.calls[id] = cancel
	s.mu.Unlock()
	return ctx, func() {
		cancel()
		s.mu.Lock()
		delete(s.calls, id)
		s.mu.Unlock()
	}
}

func (s *server) send(r Response) {
	s.writing.Lock()
	defer s.writing.Unlock()
	if writeFrame(s.out, r) == nil {
		_ = s.out.Flush() // the client is gone: its input has ended, too
	}
}

func (s *server) reply(ctx context.Context, r Request) {
	result, err := s.handle(ctx, r)
	if err != nil {
		var typed *Error
		if !errors.As(err, &typed) {
			typed = fail(ReasonStart, "", "%v", err)
		}
		s.send(Response{ID: r.ID, Error: typed})
		return
	}
	s.send(Response{ID: r.ID, Result: result})
}

// params are those of all requests but run and warm.
type params struct {
	Box     string  `json:"box"`
	Process string  `json:"process"`
	Request int64   `json:"request"`
	Spec    Spec    `json:"spec"`
	Command Command `json:"command"`
	Data    Data    `json:"data"`
	EOF     bool    `json:"eof"`
}

type nothing struct{}

func (s *server) handle(ctx context.Context, r Request) (any, error) {
	var p params
	var job Job
	var warm Warm
	var into any = &p
	switch r.Method {
	case "run":
		into = &job
	case "warm":
		into = &warm
	}
	if err := decode(r, into); err != nil {
		return nil, err
	}
	switch r.Method {
	case "probe":
		return s.host.Probe(), nil
	case "warm":
		return nothing{}, s.pool.set(warm)
	case "run":
		ready, err := s.pool.take(job.Spec)
		if err != nil {
			return nil, err
		}
		defer s.pool.work.Go(ready.close)
		return ready.box.Run(ctx, job.Command)
	case "open":
		return s.open(ctx, "", p.Spec)
	case "reset":
		box, err := s.box(p.Box)
		if err != nil {
			return nil, err
		}
		s.discard(box)
		return s.open(ctx, box.id, box.spec)
	case "exec":
		box, err := s.box(p.Box)
		if err != nil {
			return nil, err
		}
		return box.box.Run(ctx, p.Command)
	case "start":
		box, err := s.box(p.Box)
		if err != nil {
			return nil, err
		}
		process, err := box.box.Start(ctx, p.Command)
		if err != nil {
			return nil, err
		}
		if ctx.Err() != nil { // the client does not wait for it
			process.stop()
			process.Stdin.Close()
			process.Stdout.Close()
			process.Stderr.Close()
			return nil, fail(ReasonNoBox, "", "the start was canceled")
		}
		return map[string]string{"process": s.stream(box.id, process, p.Command)}, nil
	case "write":
		return nothing{}, s.write(p)
	case "kill":
		process, err := s.process(p.Process)
		if err != nil {
			return nil, err
		}
		process.stop()
		return nothing{}, nil
	case "close":
		box, err := s.box(p.Box)
		if err != nil {
			return nil, err
		}
		s.discard(box)
		return nothing{}, nil
	case "cancel":
		s.mu.Lock()
		if stop := s.calls[p.Request]; stop != nil {
			stop()
		}
		s.mu.Unlock()
		return nothing{}, nil
	}
	return nil, fail(ReasonFrame, "use probe, warm, run, open, exec, start, write, kill, reset, close, or cancel", "method: %q is not known", r.Method)
}

func decode(r Request, into any) error {
	if len(r.Params) == 0 {
		return nil
	}
	decoder := json.NewDecoder(bytes.NewReader(r.Params))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(into); err != nil {
		return fail(ReasonSpec, "see docs/tools.md for its fields", "params of %s: %v", r.Method, err)
	}
	return nil
}

// opened is the answer to open and reset.
type opened struct {
	Box     string `json:"box"`
	Process string `json:"process,omitempty"`
}

func (s *server) open(ctx context.Context, id string, spec Spec) (any, error) {
	ready, err := s.pool.take(spec)
	if err != nil {
		return nil, err
	}
	if id == "" && ctx.Err() != nil { // the client does not wait for it; a box with an id is closed by it
		ready.close()
		return nil, fail(ReasonNoBox, "", "the open was canceled")
	}
	s.mu.Lock()
	if id == "" {
		s.sequence++
		id = fmt.Sprintf("box-%d", s.sequence)
	}
	s.boxes[id] = &openBox{id: id, spec: spec, readyBox: ready}
	s.mu.Unlock()
	out := opened{Box: id}
	if ready.prestart != nil {
		out.Process = s.stream(id, ready.prestart, ready.command)
	}
	return out, nil
}

func (s *server) box(id string) (*openBox, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if b := s.boxes[id]; b != nil {
		return b, nil
	}
	return nil, fail(ReasonNoBox, "open one first", "box: %q is not open", id)
}

func (s *server) process(id string) (*stream, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.processes[id]; p != nil {
		return p, nil
	}
	return nil, fail(ReasonNoBox, "start one first", "process: %q does not run", id)
}

// discard closes a box; its id is free again.
func (s *server) discard(b *openBox) {
	s.mu.Lock()
	if s.boxes[b.id] == b {
		delete(s.boxes, b.id)
	}
	s.mu.Unlock()
	b.close()
}

// stream forwards the output of a process as events, then its end.
func (s *server) stream(box string, process *Process, command Command) string {
	s.mu.Lock()
	s.sequence++
	id := fmt.Sprintf("process-%d", s.sequence)
	st := &stream{Process: process, box: box}
	s.processes[id] = st
	s.mu.Unlock()
	ctx, cancel := context.WithCancelCause(s.ctx)
	// Output is forwarded while the process runs, so only a limit of the command itself applies.
	left := cmp.Or(command.OutputBytes, math.MaxInt64)
	var total atomic.Int64
	var readers sync.WaitGroup
	forward := func(name string, from io.Reader) {
		buffer := make([]byte, 32<<10)
		for {
			n, err := from.Read(buffer)
			if total.Add(int64(n)) > left {
				cancel(errOutput)
			} else if n > 0 {
				s.send(Response{Event: &Event{Process: id, Stream: name, Data: bytes.Clone(buffer[:n])}})
			}
			if err != nil {
				return
			}
		}
	}
	readers.Go(func() { forward("stdout", process.Stdout) })
	readers.Go(func() { forward("stderr", process.Stderr) })
	if len(command.Stdin) > 0 {
		go func() {
			st.writing.Lock()
			defer st.writing.Unlock()
			_, _ = process.Stdin.Write(command.Stdin)
		}()
	}
	s.work.Go(func() {
		defer cancel(nil)
		result, err := process.Wait(ctx, time.Duration(command.WallTimeS*float64(time.Second)))
		process.drain(&readers, command.KeepBackground)
		s.mu.Lock()
		delete(s.processes, id)
		s.mu.Unlock()
		event := &Event{Process: id, Result: &result}
		var typed *Error
		if errors.As(err, &typed) {
			event.Result, event.Error = nil, typed
		}
		s.send(Response{Event: event})
	})
	return id
}

func (s *server) write(p params) error {
	process, err := s.process(p.Process)
	if err != nil {
		return err
	}
	process.writing.Lock()
	defer process.writing.Unlock()
	if len(p.Data) > 0 {
		if _, err := process.Stdin.Write(p.Data); err != nil && !errors.Is(err, os.ErrClosed) {
			return fail(ReasonNoBox, "start another one", "process: %s has closed its input: %v", p.Process, err)
		}
	}
	if p.EOF {
		process.Stdin.Close()
	}
	return nil
}

// close closes every box and waits for what still runs.
func (s *server) close() {
	s.closeBoxes()
	s.work.Wait()
	s.closeBoxes() // those that a request opened in the meantime
	s.pool.close()
}

func (s *server) closeBoxes() {
	s.mu.Lock()
	boxes := s.boxes
	s.boxes = map[string]*openBox{}
	s.mu.Unlock()
	var closing sync.WaitGroup
	for _, b := range boxes {
		closing.Go(b.close)
	}
	closing.Wait()
}
