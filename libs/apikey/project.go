package apikey

import (
	"context"
	"errors"
	"sync"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// maxKnown bounds the runs whose project a process remembers.
const maxKnown = 10_000

// ErrProject means that a key was used to create something in another project.
var ErrProject = rpcerr.New(codes.PermissionDenied, "API_KEY_PROJECT", "the API key belongs to another project").
	Fix("use a key of that project, or leave the project out")

// ErrNotVisible is the answer about a run that does not exist or belongs to another project: a key
// cannot tell which.
var ErrNotVisible = rpcerr.New(codes.NotFound, "RUN_NOT_FOUND", "there is no such run").Fix("`rollout runs list` shows all runs")

// ProjectOf returns the project that a call is limited to; limited is false for calls without a
// key, which see all projects.
func ProjectOf(ctx context.Context) (project string, limited bool) {
	key := From(ctx)
	return key.GetProject(), key != nil
}

// ProjectFor returns the project of what a call creates: that of its key, else the wanted one.
// ErrProject if a key wants another project than its own.
func ProjectFor(ctx context.Context, wanted string) (string, error) {
	project, limited := ProjectOf(ctx)
	if !limited {
		return wanted, nil
	}
	if wanted != "" && wanted != project {
		return "", ErrProject.WithMessage("the API key %s belongs to the project %q, and the request names %q", From(ctx).GetName(), project, wanted)
	}
	return project, nil
}

// Projects decides which runs a key sees. The project of a run never changes, so that it is asked
// for once. nil sees everything. Its methods may be called from many goroutines.
type Projects struct {
	source func(ctx context.Context, run string) (string, error)
	mu     sync.Mutex
	known  map[string]string // by run
}

// NewProjects makes a Projects. source returns the project of a run, or an error with the code
// NotFound.
func NewProjects(source func(ctx context.Context, run string) (string, error)) *Projects {
	return &Projects{source: source, known: map[string]string{}}
}

// Check returns ErrNotVisible if the key of a call does not see a run.
func (p *Projects) Check(ctx context.Context, run string) error {
	project, limited := ProjectOf(ctx)
	if p == nil || !limited {
		return nil
	}
	if run == "" {
		return ErrNotVisible
	}
	of, err := p.of(ctx, run)
	if rpcerr.Code(err) == codes.NotFound || err == nil && of != project {
		return ErrNotVisible.WithMessage("there is no run %q", run)
	}
	return err
}

// CheckNew is Check for a run that need not exist.
func (p *Projects) CheckNew(ctx context.Context, run string) error {
	project, limited := ProjectOf(ctx)
	if p == nil || !limited {
		return nil
	}
	of, err := p.of(ctx, run)
	if rpcerr.Code(err) == codes.NotFound {
		return nil
	}
	if err == nil && of != project {
		return ErrNotVisible.WithMessage("there is no run %q", run)
	}
	return err
}

// Sees is Check for lists: false for a run that the key does not see. Other errors are returned.
func (p *Projects) Sees(ctx context.Context, run string) (bool, error) {
	err := p.Check(ctx, run)
	if errors.Is(err, ErrNotVisible) {
		return false, nil
	}
	return err == nil, err
}

func (p *Projects) of(ctx context.Context, run string) (string, error) {
	p.mu.Lock()
	project, known := p.known[run]
	p.mu.Unlock()
	if known {
		return project, nil
	}
	project, err := p.source(ctx, run)
	if err != nil {
		return "", err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.known) >= maxKnown {
		clear(p.known)
	}
	p.known[run] = project
	return project, nil
}
