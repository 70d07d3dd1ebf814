package sandbox

import (
	"context"
	"encoding/json"
	"sync"
	"time"
)

// Warm describes boxes that are built before they are needed.
type Warm struct {
	Spec  Spec `json:"spec"`
	Count int  `json:"count"` // boxes to keep ready; 0 drops them
	// Prestart is a command that each of them runs already, as an interpreter whose start is slow.
	Prestart *Command `json:"prestart,omitempty"`
}

// pool keeps boxes ready by spec. A box that was used is closed, not put back.
type pool struct {
	host *Host
	ctx  context.Context
	work sync.WaitGroup

	mu     sync.Mutex
	stocks map[string]*stock
}

// stock is the ready boxes of one spec.
type stock struct {
	warm     Warm
	ready    []*readyBox
	building int
}

// readyBox is a box, and the command that was started in it beforehand.
type readyBox struct {
	box      *Box
	prestart *Process
	command  Command // of prestart
}

func (r *readyBox) close() { r.box.Close() }

// key identifies boxes that can stand in for each other.
func key(spec Spec) string {
	raw, _ := json.Marshal(spec)
	return string(raw)
}

// set changes how many boxes of a spec are kept, and returns when the first of them are ready.
func (p *pool) set(w Warm) error {
	spec, err := w.Spec.fill()
	if err != nil {
		return err
	}
	if err := p.host.report.allow(spec); err != nil {
		return err
	}
	if w.Count < 0 || w.Count > 1024 {
		return fail(ReasonSpec, "use a number from 0 to 1024", "count: %d boxes can't be kept ready", w.Count)
	}
	w.Spec = spec
	p.mu.Lock()
	s := p.stocks[key(spec)]
	if s == nil {
		s = &stock{}
		p.stocks[key(spec)] = s
	}
	stale := s.ready
	s.ready, s.warm = nil, w
	p.mu.Unlock()
	for _, r := range stale {
		p.work.Go(r.close)
	}
	var first error
	var once sync.Once
	var builds sync.WaitGroup
	for range w.Count {
		builds.Go(func() {
			if err := p.add(s); err != nil {
				once.Do(func() { first = err })
			}
		})
	}
	builds.Wait()
	return first
}

// add builds one box for a stock.
func (p *pool) add(s *stock) error {
	p.mu.Lock()
	if len(s.ready)+s.building >= s.warm.Count || p.ctx.Err() != nil {
		p.mu.Unlock()
		return nil
	}
	s.building++
	w := s.warm
	p.mu.Unlock()
	r, err := p.build(w)
	p.mu.Lock()
	s.building--
	keep := err == nil && p.ctx.Err() == nil && len(s.ready) < s.warm.Count
	if keep {
		s.ready = append(s.ready, r)
	}
	p.mu.Unlock()
	if err == nil && !keep {
		r.close()
	}
	return err
}

func (p *pool) build(w Warm) (*readyBox, error) {
	box, err := p.host.build(w.Spec)
	if err != nil {
		return nil, err
	}
	r := &readyBox{box: box}
	if w.Prestart != nil {
		r.command = *w.Prestart
		if r.prestart, err = box.Start(p.ctx, *w.Prestart); err != nil {
			box.Close()
			return nil, err
		}
	}
	return r, nil
}

// take returns a ready box of the spec, or builds one. Another one is built in its place.
func (p *pool) take(spec Spec) (*readyBox, error) {
	spec, err := spec.fill()
	if err != nil {
		return nil, err
	}
	if err := p.host.report.allow(spec); err != nil {
		return nil, err
	}
	p.mu.Lock()
	s := p.stocks[key(spec)]
	if s == nil {
		p.mu.Unlock()
		return p.build(Warm{Spec: spec})
	}
	var r *readyBox
	for len(s.ready) > 0 && r == nil {
		r, s.ready = s.ready[0], s.ready[1:]
		if r.box.ended() || r.prestart != nil && r.prestart.over() {
			p.work.Go(r.close)
			r = nil
		}
	}
	w := s.warm
	p.mu.Unlock()
	// The next one is built after this one has been used for a moment: its start comes first.
	p.work.Go(func() {
		select {
		case <-time.After(2 * time.Millisecond):
		case <-p.ctx.Done():
		}
		_ = p.add(s)
	})
	if r == nil {
		return p.build(w)
	}
	return r, nil
}

// close closes the ready boxes and waits for those that are being built. The context is done.
func (p *pool) close() {
	p.mu.Lock()
	var all []*readyBox
	for _, s := range p.stocks {
		all = append(all, s.ready...)
		s.ready = nil
	}
	p.mu.Unlock()
	for _, r := range all {
		p.work.Go(r.close)
	}
	p.work.Wait()
}

func (b *Box) ended() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.dead
}

func (p *Process) over() bool {
	select {
	case <-p.ended:
		return true
	default:
		return false
	}
}
