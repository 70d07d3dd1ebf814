// Package memory predicts the memory that the processes of a run take, from the sizes of the model
// and the configuration. docs/learner.md has what its parts are.
package memory

import (
	"fmt"

	"github.com/rollout-rl/rollout/libs/algorithm"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/input"
)

const (
	float = 4 // bytes of a float32: gradients, master copies, moments

	// interpreter is what a worker takes before it loads a model: Python, torch, gRPC.
	interpreter     = 400 << 20
	interpreterName = "interpreter"
	// logitsLimit is LOGITS_LIMIT of trainer/model/logprob.py: the logits of one chunk.
	logitsLimit = 1 << 25
	// scaleBlock is the number of 8-bit moments that share a scale.
	scaleBlock = 256
)

// Model has the sizes of the trained model.
type Model struct {
	input.Shape
	Parameters int64 // of the whole model
	Trained    int64 // those that have gradients: adapters, or all that are not frozen
	Block      int64 // of the largest layer
	Outside    int64 // outside of the layers: embeddings, head
	Teacher    int64 // of a teacher in a folder
	Scorers    []Scorer
}

// Scorer is a reward model, which a worker of its own serves.
type Scorer struct {
	Field      string // its table in the configuration
	Parameters int64
	Dtype      string
}

// Of returns the sizes of a model that was read, as a configuration trains it. ok is false if its
// config does not have them.
func Of(config *configv1.RunConfig, m, teacher *input.Model) (model Model, ok bool) {
	all := func(string) bool { return true }
	model = Model{Shape: m.Shape(), Parameters: m.Elements(all), Block: m.Block()}
	if model.Layers == 0 || model.Hidden == 0 || model.Heads == 0 || model.Vocabulary == 0 || model.Parameters == 0 {
		return model, false
	}
	model.Outside = max(0, model.Parameters-model.Layers*model.Block)
	if teacher != nil {
		model.Teacher = teacher.Elements(all)
	}
	frozen := map[string]bool{}
	for _, pattern := range config.GetTrain().GetFreeze() {
		names, _ := m.Match(pattern) // checked before
		for _, name := range names {
			frozen[name] = true
		}
	}
	model.Trained = m.Elements(func(name string) bool { return !frozen[name] })
	if lora := config.GetLora(); lora != nil {
		names := lora.GetTargets()
		if len(names) == 0 {
			names = m.Layers()
		}
		in, out, _ := m.Linear(names)
		model.Trained = int64(lora.GetRank()) * (in + out)
		if lora.GetDora() {
			model.Trained += out
		}
	}
	return model, true
}

// Report predicts the memory of the processes of a run. gpus: memory of each GPU of the host in
// bytes; without one the workers compute on the CPU.
func Report(config *configv1.RunConfig, model Model, gpus []uint64) *planv1.MemoryReport {
	device := "cpu"
	if len(gpus) > 0 {
		device = "cuda"
	}
	report := &planv1.MemoryReport{GpuBytes: gpus}
	l := learner{config: config, model: model, device: device, ranks: int64(max(1, config.GetTrain().GetRanks()))}
	report.Processes = append(report.Processes, l.process())
	if algorithm.Samples(config) && config.GetEngine().GetUrl() == "" {
		report.Processes = append(report.Processes, inference(config, model, device))
	}
	for _, scorer := range model.Scorers {
		b := widthOf(scorer.Dtype)
		report.Processes = append(report.Processes, &planv1.ProcessMemory{Kind: "reward", Count: 1, Device: device, Held: present(
			onHost(part(interpreterName, interpreter, "Python and torch")),
			part("weights", scorer.Parameters*b, "%s: %s parameters x %d bytes", scorer.Field, count(scorer.Parameters), b),
		)})
	}
	for _, p := range report.GetProcesses() {
		report.HeldBytes += uint64(p.GetCount()) * Tensors(p)
		report.PeakBytes += uint64(p.GetCount()) * Peak(p)
	}
	return report
}

// Held is what a process holds all the time, in bytes.
func Held(p *planv1.ProcessMemory) uint64 { return sum(p.GetHeld()) }

// Tensors is the part of Held that the sizes of the model decide, in bytes.
func Tensors(p *planv1.ProcessMemory) uint64 {
	total := uint64(0)
	for _, part := range p.GetHeld() {
		if part.GetName() != interpreterName {
			total += part.GetBytes()
		}
	}
	return total
}

// Peak is what a process takes in its largest phase, in bytes.
func Peak(p *planv1.ProcessMemory) uint64 {
	most := uint64(0)
	for _, phase := range p.GetPhases() {
		most = max(most, sum(phase.GetParts()))
	}
	return Held(p) + most
}

// OnDevice are the parts of a list that are on the device of the process, in bytes.
func OnDevice(parts []*planv1.MemoryPart) uint64 {
	total := uint64(0)
	for _, part := range parts {
		if !part.GetOnHost() {
			total += part.GetBytes()
		}
	}
	return total
}

func sum(parts []*planv1.MemoryPart) uint64 {
	total := uint64(0)
	for _, part := range parts {
		total += part.GetBytes()
	}
	return total
}

func part(name string, bytes int64, note string, args ...any) *planv1.MemoryPart {
	return &planv1.MemoryPart{Name: name, Bytes: uint64(max(0, bytes)), Note: fmt.Sprintf(note, args...)}
}

func onHost(p *planv1.MemoryPart) *planv1.MemoryPart {
	p.OnHost = true
	return p
}

// present removes the parts without bytes.
func present(parts ...*planv1.MemoryPart) []*planv1.MemoryPart {
	var out []*planv1.MemoryPart
	for _, p := range parts {
		if p.GetBytes() > 0 {
			out = append(out, p)
		}
	}
	return out
}

// width is the size of an element of the model in bytes.
func width(config *configv1.RunConfig) int64 { return widthOf(config.GetModel().GetDtype()) }

func widthOf(dtype string) int64 {
	if dtype == "float32" {
		return 4
	}
	return 2
}

// count writes a number of parameters as "7.6 B".
func count(n int64) string {
	for _, unit := range []struct {
		size int64
		name string
	}{{1e9, "B"}, {1e6, "M"}, {1e3, "k"}} {
		if n >= unit.size {
			return fmt.Sprintf("%.3g %s", float64(n)/float64(unit.size), unit.name)
		}
	}
	return fmt.Sprint(n)
}

type learner struct {
	config *configv1.RunConfig
	model  Model
	device string
	ranks  int64
}

func (l learner) process() *planv1.ProcessMemory {
	return &planv1.ProcessMemory{
		Kind: "learner", Count: uint32(l.ranks), Device: l.device,
		Held:   l.held(),
		Phases: []*planv1.MemoryPhase{{Name: "forward and backward", Parts: l.pass()}, {Name: "update", Parts: l.update()}, {Name: "snapshot", Parts: l.snapshot()}, {Name: "publication", Parts: l.publication()}},
	}
}

// held are the tensors of a rank: trainer/optim and trainer/model.
func (l learner) held() []*planv1.MemoryPart {
	m, b, r := l.model, width(l.config), l.ranks
	share := ""
	if r > 1 {
		share = fmt.Sprintf(" over %d ranks", r)
	}
	copies, network := int64(0), l.network()
	if l.reference() {
		copies = m.Parameters
	}
	critic := int64(0)
	if network {
		critic = m.Parameters - m.Outside/2
	}
	return present(
		onHost(part(interpreterName, interpreter, "Python and torch")),
		part("weights", m.Parameters*b/r, "%s parameters x %d bytes%s", count(m.Parameters), b, share),
		part("master copy", l.master(m.Trained)/r, "%s trained x 4 bytes%s", count(m.Trained), share),
		part("gradients", m.Trained*float/r, "%s trained x 4 bytes%s", count(m.Trained), share),
		part("moments", l.moments(m.Trained)/r, "%s%s", l.config.GetTrain().GetOptimizer(), share),
		part("average", l.average()/r, "train.ema_decay%s", share),
		part("reference", copies*b/r, "the initial model%s; adapters need none", share),
		part("critic", (critic*b+l.master(critic)+critic*float+l.moments(critic))/r, "algorithm.ppo.critic = \"network\", with its optimizer%s", share),
		part("teacher", m.Teacher*b/r, "%s parameters%s", count(m.Teacher), share),
		part("copy for refused gradients", l.undo()/r, "train.on_refused_gradient = \"restore\"%s", share),
	)
}

// master is the float32 copy of n trained parameters. One rank in float32 needs none: the model's
// parameters are views of it.
func (l learner) master(n int64) int64 {
	if width(l.config) == float && l.ranks == 1 {
		return 0
	}
	return n * float
}

func (l learner) moments(n int64) int64 {
	if l.config.GetTrain().GetOptimizer() == "adamw_8bit" {
		return 2*n + 2*float*n/scaleBlock
	}
	return 2 * float * n
}

func (l learner) average() int64 {
	if l.config.GetTrain().GetEmaDecay() == 0 {
		return 0
	}
	return l.model.Trained * float
}

// undo is the copy of everything that an update changes.
func (l learner) undo() int64 {
	if l.config.GetTrain().GetOnRefusedGradient() != "restore" {
		return 0
	}
	return l.state()
}

// state is what an update changes: master copy, moments, average.
func (l learner) state() int64 {
	return l.model.Trained*float + l.moments(l.model.Trained) + l.average()
}

// reference reports whether the learner has a second copy of the model: Needs.reference of the
// algorithms.
func (l learner) reference() bool {
	if l.config.GetLora() != nil {
		return false
	}
	a := l.config.GetAlgorithm()
	if a.GetDpo() != nil || a.GetIpo() != nil || a.GetKto() != nil || a.GetOnlineDpo() != nil {
		return true
	}
	kl, ok := algorithm.Setting(l.config, "kl_coefficient")
	return ok && kl.Float() > 0
}

// network reports whether the critic is a model of its own.
func (l learner) network() bool { return l.config.GetAlgorithm().GetPpo().GetCritic() == "network" }

// pass is what a micro-batch takes, in which every position is filled.
func (l learner) pass() []*planv1.MemoryPart {
	m, b := l.model, width(l.config)
	tokens := int64(l.config.GetTrain().GetTokensPerMicrobatch())
	block, checkpointed := tokens*l.saved()*b, l.config.GetTrain().GetGradientCheckpointing()
	activations, note := m.Layers*block, fmt.Sprintf("%d positions x %d layers x %s each; train.gradient_checkpointing = true takes less", tokens, m.Layers, size(l.saved()*b))
	if checkpointed {
		activations, note = m.Layers*tokens*m.Hidden*b+block, fmt.Sprintf("%d positions: the input of %d layers, and one layer", tokens, m.Layers)
	}
	rows := min(tokens, max(1, logitsLimit/m.Vocabulary))
	logits := 3 * rows * m.Vocabulary * float
	if rows < tokens {
		logits += m.Vocabulary * m.Hidden * float
	}
	gathered := int64(0)
	if l.ranks > 1 { // two layers, because the next one is gathered early, and the gradients of one
		gathered = (2*m.Block + m.Outside) * b
		if l.config.GetLora() == nil {
			gathered += (m.Block + m.Outside) * (b + float)
		}
	}
	gradients := m.Trained * b / l.ranks
	return present(
		part("activations", activations, "%s", note),
		part("logits", logits, "%d positions at a time x %d tokens", rows, m.Vocabulary),
		part("gradients of a micro-batch", gradients, "before they are added to the sum"),
		part("gathered layers", gathered, "of all ranks: two layers, embeddings, and their gradients"),
	)
}

// saved are the elements per position that the backward pass of one layer needs: the inputs of its
// norms and linear layers, queries, keys, values, and the parts of the gated MLP. In narrower types
// than float32 the norms keep float32 copies of their inputs, which count as two elements. A test
// compares this with what torch saves (python/tests/trainer/test_memory.py).
func (l learner) saved() int64 {
	m := l.model
	queries, keys := m.Heads*m.HeadDim, m.KVHeads*m.HeadDim
	narrow := width(l.config) < float
	n := 4*m.Hidden + 2*queries + 2*keys + m.Heads
	if narrow {
		n += 4*m.Hidden + m.Heads
	}
	if m.QKNorm && narrow {
		n += 3 * (queries + keys)
	} else if m.QKNorm {
		n += queries + keys
	}
	switch {
	case m.Experts > 0:
		return n + m.Active*(4*m.ExpertSize+2*m.Hidden) + m.Experts
	case narrow:
		return n + 4*m.Intermediate
	default: // the product of gate and up is computed again
		return n + 3*m.Intermediate
	}
}

// update is what the optimizer takes beside its state.
func (l learner) update() []*planv1.MemoryPart {
	updates := int64(1)
	for _, key := range []string{"epochs", "minibatches"} {
		if n, ok := algorithm.Setting(l.config, key); ok {
			updates *= max(1, int64(n.Uint()))
		}
	}
	if updates == 1 {
		return nil
	}
	return present(part("copy before several updates", l.state()/l.ranks, "%d updates per batch, which are undone together", updates))
}

// snapshot is what a rank copies to host memory.
func (l learner) snapshot() []*planv1.MemoryPart {
	weights := l.model.Parameters * width(l.config)
	if l.config.GetLora() != nil {
		weights = l.model.Trained * width(l.config)
	}
	return present(onHost(part("copy of the state", (weights+l.master(l.model.Trained)+l.moments(l.model.Trained)+l.average())/l.ranks,
		"weights, master copy, moments; written while the next step runs")))
}

// publication is what rank 0 holds while it publishes weights.
func (l learner) publication() []*planv1.MemoryPart {
	if l.config.GetLora() != nil {
		return present(onHost(part("adapters", l.model.Trained*width(l.config), "rank 0")))
	}
	return present(onHost(part("whole weights", l.model.Parameters*width(l.config), "rank 0")))
}

// inference is a worker that samples.
func inference(config *configv1.RunConfig, m Model, device string) *planv1.ProcessMemory {
	e, b := config.GetEngine(), width(config)
	token := 2 * m.Layers * m.KVHeads * m.HeadDim * b
	cache := part("KV cache", int64(e.GetSlots())*int64(e.GetMaxModelLen())*token, "%d slots x %d tokens x %s", e.GetSlots(), e.GetMaxModelLen(), size(token))
	p := &planv1.ProcessMemory{
		Kind: "inference", Count: max(1, e.GetWorkers()), Device: device,
		Held: present(onHost(part(interpreterName, interpreter, "Python and torch")), part("weights", m.Parameters*b, "%s parameters x %d bytes", count(m.Parameters), b)),
	}
	if device == "cpu" { // pages of the cache are allocated when they are first used
		p.Phases = []*planv1.MemoryPhase{{Name: "sampling", Parts: present(cache)}}
	} else {
		p.Held = append(p.Held, cache)
	}
	return p
}

// size writes bytes for a note.
func size(n int64) string {
	switch {
	case n >= 1e9:
		return fmt.Sprintf("%.1f GB", float64(n)/1e9)
	case n >= 1e6:
		return fmt.Sprintf("%.1f MB", float64(n)/1e6)
	case n >= 1e3:
		return fmt.Sprintf("%.1f kB", float64(n)/1e3)
	default:
		return fmt.Sprintf("%d B", n)
	}
}
