package input

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/rollout-rl/rollout/libs/reward"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/problem"
)

// Model describes a folder in the Hugging Face layout.
type Model struct {
	Files        []string // files that loading may read, by name, sorted
	Quantized    string   // method by which its weights were quantized; "" if they were not
	ChatTemplate bool     // whether its tokenizer has one
	Tensors      []string // names of the tensors in its files
	shapes       map[string][]int64
	shape        Shape
	Embedded     int64  // tokens with an embedding; 0: unknown
	Vocabulary   int64  // one past the last token of its tokenizer; 0: unknown
	Architecture string // first class in its config; "" without one

	tokens    map[int64]string // texts of its tokens by id
	attention []string         // kinds of its layers, as far as its config states them
	limits    []limit          // of the length of a sequence
}

// Scores reports whether it is a reward model: which can't generate completions.
func (m *Model) Scores() bool { return reward.Scores(m.Architecture) }

// ModelFiles are the patterns of the files that AutoModelForCausalLM and AutoTokenizer read.
var ModelFiles = []string{
	"config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer.json", "tokenizer_config.json",
	"special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "vocab.json", "vocab.txt", "merges.txt", "*.model",
}

// PolicyFiles are the patterns of the files that AutoModel reads for a policy that acts for many
// steps, which has no tokenizer and may have code.
var PolicyFiles = []string{"config.json", "*.safetensors", "*.safetensors.index.json", "*.py"}

// ReadPolicy is ReadModel for a policy that acts for many steps.
func ReadPolicy(folder, path, field string, problems *problem.List) *Model {
	m := &Model{shapes: map[string][]int64{}}
	r := modelReader{folder: folder, path: path, field: field, problems: problems, model: m}
	if entries := r.list(PolicyFiles); entries != nil {
		r.config()
		r.weights(m.Files, entries)
	}
	return m
}

// ReadModel checks the folder of a model. path is its name in messages, field its key. It adds
// problems.
func ReadModel(folder, path, field string, problems *problem.List) *Model {
	m := &Model{shapes: map[string][]int64{}}
	r := modelReader{folder: folder, path: path, field: field, problems: problems, model: m}
	entries := r.list(ModelFiles)
	if entries == nil {
		return m
	}
	if config := r.config(); config != nil {
		m.reach(config)
		m.Embedded = number(config, "vocab_size")
		m.shape = shapeOf(config)
	}
	tokenizer := r.object("tokenizer.json", "save it with `AutoTokenizer.from_pretrained(...).save_pretrained(...)`")
	m.Vocabulary, m.tokens = vocabulary(tokenizer), tokens(tokenizer)
	r.embeddings()
	m.ChatTemplate = slices.Contains(m.Files, "chat_template.jinja")
	if slices.Contains(m.Files, "tokenizer_config.json") {
		_, ok := r.object("tokenizer_config.json", "")["chat_template"]
		m.ChatTemplate = m.ChatTemplate || ok
	}
	r.weights(m.Files, entries)
	r.resized()
	return m
}

type modelReader struct {
	folder, path string
	field        string
	problems     *problem.List
	model        *Model
}

// list puts the files that match a pattern into the model. It returns all entries of the folder,
// nil if it can't be read.
func (r *modelReader) list(patterns []string) []os.DirEntry {
	entries, err := os.ReadDir(r.folder)
	if err != nil {
		r.bad("", "can't read the folder: "+cause(err), "check its permissions")
		return nil
	}
	for _, entry := range entries {
		matches := func(pattern string) bool { ok, _ := filepath.Match(pattern, entry.Name()); return ok }
		if !entry.IsDir() && slices.ContainsFunc(patterns, matches) {
			r.model.Files = append(r.model.Files, entry.Name())
		}
	}
	return append([]os.DirEntry{}, entries...) // not nil for an empty folder
}

// config reads config.json and the class of the model; nil without one.
func (r *modelReader) config() map[string]json.RawMessage {
	config := r.object("config.json", "copy the whole folder of the model, or save it with `save_pretrained`")
	var classes []string
	if json.Unmarshal(config["architectures"], &classes) == nil && len(classes) > 0 {
		r.model.Architecture = classes[0]
	}
	return config
}

func (r *modelReader) bad(name, message, fix string) {
	r.problems.Add(&planv1.Problem{Reason: problem.BadModel, File: r.named(name), Field: r.field, Message: message, Fix: fix})
}

func (r *modelReader) named(name string) string {
	if name == "" {
		return r.path
	}
	return strings.TrimRight(r.path, "/") + "/" + name
}

// object reads a JSON file with an object; nil if it has none.
func (r *modelReader) object(name, fix string) map[string]json.RawMessage {
	data, err := os.ReadFile(filepath.Join(r.folder, name))
	if errors.Is(err, os.ErrNotExist) {
		r.problems.Add(&planv1.Problem{
			Reason: problem.MissingFile, File: r.named(name), Field: r.field, Message: "the folder of the model has no " + name, Fix: fix,
		})
		return nil
	}
	if err != nil {
		r.bad(name, "can't read it: "+cause(err), "check its permissions")
		return nil
	}
	if r.pointer(name, data) {
		return nil
	}
	var object map[string]json.RawMessage
	if err := json.Unmarshal(data, &object); err != nil || object == nil {
		r.notJSON(name, data, err)
		return nil
	}
	return object
}

func (r *modelReader) notJSON(name string, data []byte, err error) {
	p := &planv1.Problem{
		Reason: problem.BadModel, File: r.named(name), Field: r.field,
		Message: "the file is not a JSON object", Fix: "copy the file again: it is damaged or cut off",
	}
	var syntax *json.SyntaxError
	if errors.As(err, &syntax) {
		at := min(max(int(syntax.Offset)-1, 0), len(data))
		start := bytes.LastIndexByte(data[:at], '\n') + 1
		line, _, _ := bytes.Cut(data[start:], []byte("\n"))
		p.Line = uint32(bytes.Count(data[:start], []byte("\n")) + 1)
		p.Column = uint32(utf8.RuneCount(data[start:at]) + 1)
		p.Excerpt = strings.ToValidUTF8(string(line[:min(len(line), maxExcerpt)]), "\uFFFD")
		p.Message = "the file is not JSON: " + syntax.Error()
	}
	r.problems.Add(p)
}

func (r *modelReader) pointer(name string, head []byte) bool {
	if !bytes.HasPrefix(head, []byte("version https://git-lfs")) {
		return false
	}
	r.bad(name, "the file is a pointer of Git LFS, not the data", "run `git lfs pull`")
	return true
}

// weights checks that the tensor files exist and are complete, without reading the tensors.
func (r *modelReader) weights(files []string, entries []os.DirEntry) {
	found := false
	for _, name := range files {
		if strings.HasSuffix(name, ".safetensors") {
			found = true
			r.safetensors(name)
		}
	}
	for _, name := range files {
		if strings.HasSuffix(name, ".safetensors.index.json") {
			found = true
			r.shards(name, files)
		}
	}
	if found {
		return
	}
	fix := "copy the whole folder of the model, or save it with `save_pretrained`"
	for _, entry := range entries {
		if strings.HasSuffix(entry.Name(), ".bin") || strings.HasSuffix(entry.Name(), ".pt") || strings.HasSuffix(entry.Name(), ".gguf") {
			fix = fmt.Sprintf("convert %s: load it with transformers and call `save_pretrained`", entry.Name())
		}
	}
	r.problems.Add(&planv1.Problem{
		Reason: problem.MissingFile, File: r.path, Field: r.field, Message: "the folder of the model has no weights (*.safetensors)", Fix: fix,
	})
}

// safetensors checks the header of a file: 8 bytes of length, JSON of that length, then the bytes
// of the tensors.
// Format: https://github.com/huggingface/safetensors#format
func (r *modelReader) safetensors(name string) {
	damaged := func(message string) { r.bad(name, message, "copy the file again: it is damaged or cut off") }
	f, err := os.Open(filepath.Join(r.folder, name))
	if err != nil {
		r.bad(name, "can't read it: "+cause(err), "check its permissions")
		return
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		r.bad(name, "can't read it: "+cause(err), "check its permissions")
		return
	}
	head := make([]byte, min(info.Size(), 64))
	if _, err := io.ReadFull(f, head); err != nil || r.pointer(name, head) {
		return
	}
	const most = 100 << 20
	if len(head) < 8 {
		damaged(fmt.Sprintf("the file has %d bytes, too few for the safetensors format", info.Size()))
		return
	}
	length := binary.LittleEndian.Uint64(head)
	if length > most || int64(length)+8 > info.Size() {
		damaged("the file is not in the safetensors format: its header is longer than the file")
		return
	}
	header := make([]byte, length)
	if _, err := f.ReadAt(header, 8); err != nil {
		damaged("can't read its header: " + cause(err))
		return
	}
	var tensors map[string]struct {
		Offsets [2]int64 `json:"data_offsets"`
		Shape   []int64  `json:"shape"`
	}
	if err := json.Unmarshal(header, &tensors); err != nil {
		damaged("the file is not in the safetensors format: its header is not JSON")
		return
	}
	end := int64(0)
	for name, tensor := range tensors {
		if name != "__metadata__" {
			r.model.Tensors = append(r.model.Tensors, name)
			r.model.shapes[name] = tensor.Shape
			end = max(end, tensor.Offsets[1])
		}
	}
	if want := end + 8 + int64(length); want != info.Size() {
		damaged(fmt.Sprintf("the file has %d bytes where its header says %d", info.Size(), want))
	}
}

func (r *modelReader) shards(name string, files []string) {
	index := r.object(name, "")
	var shards map[string]string
	if index == nil || json.Unmarshal(index["weight_map"], &shards) != nil {
		return
	}
	var missing []string
	for _, shard := range shards {
		if !slices.Contains(files, shard) && !slices.Contains(missing, shard) {
			missing = append(missing, shard)
		}
	}
	slices.Sort(missing)
	for _, shard := range missing {
		r.problems.Add(&planv1.Problem{
			Reason: problem.MissingFile, File: r.named(shard), Field: r.field,
			Message: "the file is missing; " + name + " names it", Fix: "copy the whole folder of the model",
		})
	}
}

// number is the value of the first key in config.json, or in its text part.
func number(config map[string]json.RawMessage, keys ...string) int64 {
	for _, object := range []json.RawMessage{nil, config["text_config"]} {
		fields := config
		if object != nil {
			fields = nil
			_ = json.Unmarshal(object, &fields)
		}
		for _, key := range keys {
			var n int64
			if json.Unmarshal(fields[key], &n) == nil && n > 0 {
				return n
			}
		}
	}
	return 0
}

// cause is an error without the path, which the message has.
func cause(err error) string {
	var path *os.PathError
	if errors.As(err, &path) {
		return path.Err.Error()
	}
	return err.Error()
}
