package live

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	tea "charm.land/bubbletea/v2"

	"github.com/rollout-rl/rollout/cmd/internal/output"
)

const (
	defaultWidth = 80
	frames       = 10 // maximum redraws per second
)

// Screen is the bubbletea model of the view on a terminal.
type Screen struct {
	Run        *Run
	Interrupts int // number of Ctrl-C
	Detached   bool
	Done       bool
	Err        error

	style   output.Style
	zone    *time.Location
	width   int
	tallest int // lines of the tallest view so far
	blank   int // empty lines at the end of the last view
	updates <-chan Update
	stop    func(drain bool) error
}

// stopFailed reports that the request to stop the run failed.
type stopFailed struct{ err error }

// interrupted is a signal; InterruptMsg of bubbletea would end the program.
type interrupted struct{}

// clockTick redraws durations.
type clockTick struct{}

func tick() tea.Cmd { return tea.Tick(time.Second, func(time.Time) tea.Msg { return clockTick{} }) }

// Init asks for the first update.
func (m *Screen) Init() tea.Cmd { return tea.Batch(m.next(), tick()) }

// next waits for one update.
func (m *Screen) next() tea.Cmd {
	return func() tea.Msg {
		u, ok := <-m.updates
		if !ok {
			return Update{Done: true}
		}
		return u
	}
}

// Update handles a key, a new size or an update of the run.
func (m *Screen) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch msg := msg.(type) {
	case tea.WindowSizeMsg:
		m.width = msg.Width
	case tea.KeyPressMsg:
		return m, m.key(msg.String())
	case interrupted:
		return m, m.key("ctrl+c")
	case clockTick:
		return m, tick()
	case stopFailed:
		m.Err = msg.err
		return m, tea.Quit
	case Update:
		return m, m.take(msg)
	}
	return m, nil
}

func (m *Screen) key(key string) tea.Cmd {
	switch key {
	case "ctrl+c":
		m.Interrupts++
		if m.Interrupts > 2 {
			m.Detached = true
			return tea.Quit
		}
		drain := m.Interrupts == 1
		return func() tea.Msg {
			if err := m.stop(drain); err != nil {
				return stopFailed{err}
			}
			return nil
		}
	case "d", "q":
		m.Detached = true
		return tea.Quit
	}
	return nil
}

func (m *Screen) take(u Update) tea.Cmd {
	switch {
	case u.Err != nil:
		m.Err = u.Err
		return tea.Quit
	case u.Done:
		m.Done = true
		return tea.Quit
	case u.Status != nil:
		m.Run.Update(u.Status)
	case u.Event != nil:
		m.Run.Add(u.Event)
	default:
		for _, e := range u.History {
			m.Run.Add(e)
		}
	}
	return m.next()
}

// View draws the run.
func (m *Screen) View() tea.View {
	hint := "Ctrl-C: stop after the current step; d: detach, the run continues"
	if m.Interrupts > 0 {
		hint = stopping(m.Interrupts)
	}
	if m.Done || m.Detached || m.Err != nil {
		hint = ""
	}
	view := tea.NewView(m.pad(strings.TrimSuffix(m.Run.View(m.style, m.width, m.zone, hint), "\n")))
	if run := m.Run.Status.GetRun(); run != nil {
		view.WindowTitle = fmt.Sprintf("%s %d/%d", run.GetName(), m.Run.CommittedSteps(), run.GetTotalSteps())
	}
	return view
}

// pad fills the view up to the tallest one so far: when a view shrinks, the renderer misplaces the
// cursor and leaves its first lines on the screen.
func (m *Screen) pad(text string) string {
	lines := strings.Count(text, "\n") + 1
	m.tallest = max(m.tallest, lines)
	m.blank = m.tallest - lines
	return text + strings.Repeat("\n", m.blank)
}

// screen redraws the view until the run has ended or the user detaches.
func (w *Watcher) screen(ctx context.Context, updates <-chan Update) (*Outcome, error) {
	model := &Screen{
		Run: &Run{}, style: w.Style, zone: w.Zone, width: defaultWidth, updates: updates,
		stop: func(drain bool) error { return w.stop(ctx, drain) },
	}
	program := tea.NewProgram(model, tea.WithContext(ctx), tea.WithOutput(w.Out), tea.WithInput(w.In),
		tea.WithoutSignalHandler(), tea.WithFPS(frames))
	ended := make(chan struct{})
	forwarded := make(chan struct{})
	go func() { // a SIGINT or SIGTERM is handled like Ctrl-C
		defer close(forwarded)
		for {
			select {
			case <-w.Interrupts:
				program.Send(interrupted{})
			case <-ended:
				return
			}
		}
	}()
	_, err := program.Run()
	close(ended)
	<-forwarded
	if model.blank > 1 { // remove the padding
		fmt.Fprintf(w.Out, "\x1b[%dA", model.blank-1)
	}
	outcome := &Outcome{Run: model.Run, Detached: model.Detached, Stopped: model.Interrupts > 0}
	if err != nil && !errors.Is(err, tea.ErrProgramKilled) {
		return outcome, err
	}
	if ctx.Err() != nil {
		return outcome, ctx.Err()
	}
	return outcome, model.Err
}
