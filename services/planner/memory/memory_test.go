package memory

import (
	"encoding/json"
	"flag"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/input"
)

var update = flag.Bool("update", false, "write the table of docs/learner.md")

// What torch saves per position and layer; python/tests/trainer/test_memory.py measures it.
func TestActivationsAreThoseThatTorchSaves(t *testing.T) {
	t.Parallel()
	data, err := os.ReadFile("testdata/activations.json")
	if err != nil {
		t.Fatal(err)
	}
	var cases []struct {
		Model, Dtype string
		Hidden       int64 `json:"hidden_size"`
		Intermediate int64 `json:"intermediate_size"`
		Heads        int64 `json:"num_attention_heads"`
		KVHeads      int64 `json:"num_key_value_heads"`
		HeadDim      int64 `json:"head_dim"`
		ExpertSize   int64 `json:"moe_intermediate_size"`
		Experts      int64 `json:"num_experts"`
		Active       int64 `json:"num_experts_per_tok"`
		Bytes        int64
	}
	if err := json.Unmarshal(data, &cases); err != nil || len(cases) < 8 {
		t.Fatal(len(cases), err)
	}
	for _, c := range cases {
		shape := input.Shape{
			Hidden: c.Hidden, Intermediate: c.Intermediate, Heads: c.Heads, KVHeads: c.KVHeads, HeadDim: c.HeadDim,
			Experts: c.Experts, Active: c.Active, ExpertSize: c.ExpertSize, QKNorm: strings.HasPrefix(c.Model, "Qwen3"),
		}
		if shape.HeadDim == 0 {
			shape.HeadDim = c.Hidden / c.Heads
		}
		l := learner{config: &configv1.RunConfig{Model: &configv1.ModelConfig{Dtype: &c.Dtype}}, model: Model{Shape: shape}}
		if got := l.saved() * width(l.config); math.Abs(float64(got-c.Bytes)) > 0.02*float64(c.Bytes) {
			t.Errorf("%s in %s: %d bytes per position and layer, torch saves %d", c.Model, c.Dtype, got, c.Bytes)
		}
	}
}

// published are shapes from the config.json of models, with their numbers of parameters.
var published = []struct {
	name       string
	shape      input.Shape
	tied, bias bool
	parameters float64 // in billions, from the model card
}{
	{"Qwen2.5-0.5B", input.Shape{Layers: 24, Hidden: 896, Intermediate: 4864, Heads: 14, KVHeads: 2, HeadDim: 64, Vocabulary: 151_936}, true, true, 0.49},
	{"Qwen2.5-7B", input.Shape{Layers: 28, Hidden: 3584, Intermediate: 18_944, Heads: 28, KVHeads: 4, HeadDim: 128, Vocabulary: 152_064}, false, true, 7.61},
	{"Qwen2.5-32B", input.Shape{Layers: 64, Hidden: 5120, Intermediate: 27_648, Heads: 40, KVHeads: 8, HeadDim: 128, Vocabulary: 152_064}, false, true, 32.5},
	{"Llama-3.1-70B", input.Shape{Layers: 80, Hidden: 8192, Intermediate: 28_672, Heads: 64, KVHeads: 8, HeadDim: 128, Vocabulary: 128_256}, false, false, 70.6},
	{"Qwen3-235B-A22B", input.Shape{
		Layers: 94, Hidden: 4096, Intermediate: 12_288, Heads: 64, KVHeads: 4, HeadDim: 128, Vocabulary: 151_936,
		Experts: 128, Active: 8, ExpertSize: 1536, QKNorm: true,
	}, false, false, 235},
}

// sized is the Model of a shape, all of whose parameters are trained.
func sized(s input.Shape, tied, bias bool) Model {
	block := s.Hidden*s.HeadDim*(2*s.Heads+2*s.KVHeads) + 2*s.Hidden
	if bias {
		block += s.HeadDim * (s.Heads + 2*s.KVHeads)
	}
	if s.QKNorm {
		block += 2 * s.HeadDim
	}
	if s.Experts > 0 {
		block += s.Experts * (3*s.Hidden*s.ExpertSize + s.Hidden)
	} else {
		block += 3 * s.Hidden * s.Intermediate
	}
	outside := s.Vocabulary*s.Hidden + s.Hidden
	if !tied {
		outside += s.Vocabulary * s.Hidden
	}
	all := s.Layers*block + outside
	return Model{Shape: s, Parameters: all, Trained: all, Block: block, Outside: outside}
}

func config(ranks uint32, edit func(*configv1.RunConfig)) *configv1.RunConfig {
	c := &configv1.RunConfig{
		Model:     &configv1.ModelConfig{Dtype: proto.String("bfloat16")},
		Algorithm: &configv1.AlgorithmConfig{Kind: &configv1.AlgorithmConfig_Grpo{Grpo: &configv1.GrpoConfig{}}},
		Train: &configv1.TrainConfig{
			Ranks: &ranks, TokensPerMicrobatch: proto.Uint32(16_384), Optimizer: proto.String("adamw"), GradientCheckpointing: proto.Bool(true),
		},
		Engine:   &configv1.EngineConfig{Workers: proto.Uint32(1), Slots: proto.Uint32(64), MaxModelLen: proto.Uint32(8192)},
		Sampling: &configv1.SamplingConfig{GroupSize: proto.Uint32(8)},
	}
	if edit != nil {
		edit(c)
	}
	return c
}

func TestSizesOfPublishedModels(t *testing.T) {
	t.Parallel()
	for _, p := range published {
		if got := float64(sized(p.shape, p.tied, p.bias).Parameters) / 1e9; math.Abs(got-p.parameters) > 0.01*p.parameters {
			t.Errorf("%s: %.3f B parameters, published %.2f B", p.name, got, p.parameters)
		}
	}
}

// The rank of a 7B model over 8 ranks, whose bytes python/tests/trainer/test_size.py counts.
func TestARankOf7BHolds18BytesPerParameter(t *testing.T) {
	t.Parallel()
	m := sized(published[1].shape, false, true)
	report := Report(config(8, nil), m, slices.Repeat([]uint64{80e9}, 8))
	l := report.GetProcesses()[0]
	if got, want := OnDevice(l.GetHeld()), uint64(18*m.Parameters/8); math.Abs(float64(got)-float64(want)) > 8 {
		t.Errorf("%d bytes, want %d", got, want)
	}
	copied := uint64(0)
	for _, phase := range l.GetPhases() {
		if phase.GetName() == "snapshot" {
			copied = sum(phase.GetParts())
		}
	}
	if want := uint64(14 * m.Parameters / 8); math.Abs(float64(copied)-float64(want)) > 8 {
		t.Errorf("a snapshot copies %d bytes, want %d", copied, want)
	}
}

func names(parts []*planv1.MemoryPart) string {
	var out []string
	for _, p := range parts {
		out = append(out, p.GetName())
	}
	return strings.Join(out, ", ")
}

func TestWhatALearnerHoldsFollowsTheConfiguration(t *testing.T) {
	t.Parallel()
	m := sized(published[0].shape, true, true)
	for _, c := range []struct {
		name  string
		edit  func(*configv1.RunConfig)
		ranks uint32
		want  string
	}{
		{"bfloat16", nil, 1, "interpreter, weights, master copy, gradients, moments"},
		{"float32", func(c *configv1.RunConfig) { c.Model.Dtype = proto.String("float32") }, 1, "interpreter, weights, gradients, moments"},
		{"float32 over ranks", func(c *configv1.RunConfig) { c.Model.Dtype = proto.String("float32") }, 2, "interpreter, weights, master copy, gradients, moments"},
		{"KL", func(c *configv1.RunConfig) {
			c.Algorithm.GetGrpo().Loss = &configv1.PolicyLossConfig{KlCoefficient: proto.Float64(0.1)}
		}, 1, "interpreter, weights, master copy, gradients, moments, reference"},
		{"DPO", func(c *configv1.RunConfig) {
			c.Algorithm.Kind = &configv1.AlgorithmConfig_Dpo{Dpo: &configv1.DpoConfig{}}
		}, 1, "interpreter, weights, master copy, gradients, moments, reference"},
		{"DPO of adapters", func(c *configv1.RunConfig) {
			c.Algorithm.Kind, c.Lora = &configv1.AlgorithmConfig_Dpo{Dpo: &configv1.DpoConfig{}}, &configv1.LoraConfig{}
		}, 1, "interpreter, weights, master copy, gradients, moments"},
		{"average, copy, and critic", func(c *configv1.RunConfig) {
			c.Algorithm.Kind = &configv1.AlgorithmConfig_Ppo{Ppo: &configv1.PpoConfig{Critic: proto.String("network")}}
			c.Train.EmaDecay, c.Train.OnRefusedGradient = proto.Float64(0.99), proto.String("restore")
		}, 1, "interpreter, weights, master copy, gradients, moments, average, critic, copy for refused gradients"},
	} {
		l := Report(config(c.ranks, c.edit), m, nil).GetProcesses()[0]
		if got := names(l.GetHeld()); got != c.want {
			t.Errorf("%s: %s", c.name, got)
		}
	}
	eight := func(c *configv1.RunConfig) { c.Train.Optimizer = proto.String("adamw_8bit") }
	half := Report(config(1, nil), m, nil).GetHeldBytes() - Report(config(1, eight), m, nil).GetHeldBytes()
	if want := uint64(6*m.Trained - 8*m.Trained/256); half != want {
		t.Errorf("8-bit moments save %d bytes, want %d", half, want)
	}
}

func TestWhatDoesNotFitIsNamed(t *testing.T) {
	t.Parallel()
	m := sized(published[1].shape, false, true)
	for _, c := range []struct {
		name   string
		config *configv1.RunConfig
		host   uint64
		gpus   []uint64
		want   string
	}{
		{"a laptop", config(1, nil), 16e9, nil,
			"the host has 16.0 GB of memory, and the processes of the run hold 152.3 GB before the first step: 1 x learner 137.1 GB, 1 x inference 15.2 GB"},
		{"one GPU", config(1, nil), 16e9, []uint64{80e9},
			"GPU 0 has 80.0 GB of memory, and the processes on it hold 182.4 GB before the first step: learner 137.1 GB, inference 45.3 GB"},
		{"8 GPUs, of which 7 train", config(7, nil), 16e9, slices.Repeat([]uint64{80e9}, 8), ""},
		{"8 GPUs that train and sample", config(8, func(c *configv1.RunConfig) { c.Engine.Workers = proto.Uint32(8) }), 0, slices.Repeat([]uint64{80e9}, 8), ""},
		{"a reward model on the GPU after the inference worker", config(1, nil), 0, []uint64{200e9, 46e9, 1e9},
			"GPU 2 has 1.0 GB of memory, and the processes on it hold 14.0 GB before the first step: reward 14.0 GB"},
		{"a large host", config(1, nil), 256e9, nil, ""},
	} {
		m.Scorers = nil
		if strings.HasPrefix(c.name, "a reward model") {
			m.Scorers = []Scorer{{Field: "reward.model", Parameters: 7e9, Dtype: "bfloat16"}}
		}
		report := Report(c.config, m, c.gpus)
		report.HostBytes = c.host
		if got := strings.Join(Misfits(c.config, report), "\n"); got != c.want {
			t.Errorf("%s: %q", c.name, got)
		}
	}
}

// The table in docs/learner.md is of these functions.
func TestTheTableOfTheDocumentIsUpToDate(t *testing.T) {
	t.Parallel()
	var table strings.Builder
	table.WriteString("| model | trained | GPUs of 80 GB that hold the state | rank, always | rank, at most | inference worker |\n|---|---|---|---|---|---|\n")
	for _, p := range published {
		m := sized(p.shape, p.tied, p.bias)
		adapters := m
		adapters.Trained = 64 * m.Layers * (m.Hidden*2 + m.HeadDim*(2*m.Heads+2*m.KVHeads) + m.Hidden*2) / 2 // rank 64 on attention
		for _, kind := range []string{"all", "adapters"} {
			trained, edit := m, (func(*configv1.RunConfig))(nil)
			if kind == "adapters" {
				trained, edit = adapters, func(c *configv1.RunConfig) { c.Lora = &configv1.LoraConfig{Rank: proto.Uint32(64)} }
			}
			ranks := uint32(1)
			var l *planv1.ProcessMemory
			var inference *planv1.ProcessMemory
			for ; ; ranks *= 2 {
				report := Report(config(ranks, edit), trained, slices.Repeat([]uint64{80e9}, int(ranks)))
				l, inference = report.GetProcesses()[0], report.GetProcesses()[1]
				if deviceMost(l) <= 80e9 || ranks == 512 {
					break
				}
			}
			fmt.Fprintf(&table, "| %s | %s | %d | %s | %s | %s |\n", p.name, kind, ranks, size(int64(OnDevice(l.GetHeld()))), size(int64(deviceMost(l))), size(int64(OnDevice(inference.GetHeld()))))
		}
	}
	const path, begin, end = "../../../docs/learner.md", "<!-- table of memory: made by services/planner/memory -->\n", "<!-- end -->\n"
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, found := strings.Cut(string(data), begin)
	old, after, closed := strings.Cut(rest, end)
	if !found || !closed {
		t.Fatal("docs/learner.md has no place for the table")
	}
	if old == table.String() {
		return
	}
	if !*update {
		t.Fatalf("docs/learner.md has another table; run this test with -update:\n%s", table.String())
	}
	if err := os.WriteFile(path, []byte(before+begin+table.String()+end+after), 0o600); err != nil {
		t.Fatal(err)
	}
}

// deviceMost is what a rank has on its GPU in its largest phase.
func deviceMost(p *planv1.ProcessMemory) uint64 {
	most := uint64(0)
	for _, phase := range p.GetPhases() {
		most = max(most, OnDevice(phase.GetParts()))
	}
	return OnDevice(p.GetHeld()) + most
}
