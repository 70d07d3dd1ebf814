package main

import (
	"context"
	"fmt"
	"hash/crc32"
	"math"
	"math/rand/v2"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/proto/gen/names"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
)

// longest is the most tokens of a completion.
const longest = 4096

// sampled is a simulated completion.
type sampled struct {
	tokens  int
	version uint64
}

// noise is the content of tokens and logprobs; like real ones, it does not compress.
var noise = func() []byte {
	dice := rand.New(rand.NewPCG(1, 2))
	out := make([]byte, 8*longest+1<<16)
	for i := range out {
		out[i] = 32 + byte(dice.IntN(95))
	}
	return out
}()

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// length draws the tokens of a completion.
func (p pace) length(dice *rand.Rand) int {
	drawn := p.mean * math.Exp(p.sigma*dice.NormFloat64()-p.sigma*p.sigma/2)
	return max(1, min(longest, int(drawn)))
}

// publish puts a group's trajectories on the stream, and then acknowledges the work.
func (w *worker) publish(ctx context.Context, group *runv1.PromptGroup, made []sampled, reply string) {
	batch := &trajectoryv1.TrajectoryBatch{}
	tokens := 0
	for n, s := range made {
		tokens += s.tokens
		batch.Trajectories = append(batch.Trajectories, w.envelope(group, uint32(n), s))
	}
	body, err := proto.Marshal(batch)
	if err != nil {
		w.fleet.log.Error("encode", "error", err)
		return
	}
	m := &nats.Msg{Subject: names.TrajSubject(w.spec.GetRunId()), Data: body, Header: nats.Header{}}
	m.Header.Set("Nats-Msg-Id", fmt.Sprintf("%s/%d/%d/%d", w.spec.GetWorkerId(), group.GetEpoch(), group.GetIndex(), group.GetAttempt()))
	for {
		asking, cancel := context.WithTimeout(ctx, 10*time.Second)
		_, err = w.work.RequestMsgWithContext(asking, m)
		cancel()
		if err == nil || ctx.Err() != nil {
			break
		}
		w.fleet.log.Error("publish; retrying", "error", err)
	}
	w.mu.Lock()
	delete(w.active, reply)
	w.done += len(made)
	w.tokens += tokens
	w.mu.Unlock()
	w.fleet.samples.Add(uint64(len(made)))
	_ = w.work.Publish(reply, []byte("+ACK")) // if it is lost, the work is redelivered
}

func (w *worker) envelope(group *runv1.PromptGroup, n uint32, s sampled) *trajectoryv1.TrajectoryEnvelope {
	key := &trajectoryv1.TrajectoryKey{RunId: group.GetRunId(), Epoch: group.GetEpoch(), Index: group.GetIndex(), Attempt: group.GetAttempt(), Sample: n}
	total := w.fleet.pace.prompt + s.tokens
	cut := func(bytes int) []byte {
		from := int((group.GetIndex()*31 + uint64(n)*7) % (1 << 15))
		return noise[from : from+bytes]
	}
	payload, err := proto.Marshal(&trajectoryv1.Trajectory{
		Key: key, TokenIds: cut(4 * total), Logprobs: cut(4 * total), RawLogprobs: cut(4 * total), LossMask: cut(total),
		PromptTokens: uint32(w.fleet.pace.prompt), Outcome: trajectoryv1.Outcome_OUTCOME_COMPLETED,
		VersionSpans: []*trajectoryv1.VersionSpan{{Version: s.version, End: uint32(s.tokens), Digest: digest(s.version)}},
		Completion:   string(cut(4 * s.tokens)),
	})
	if err != nil {
		panic(err) // of bytes and numbers alone
	}
	return &trajectoryv1.TrajectoryEnvelope{
		Header: &trajectoryv1.TrajectoryHeader{
			Key: key, GroupSize: group.GetGroupSize(), Outcome: trajectoryv1.Outcome_OUTCOME_COMPLETED, MinVersion: s.version, MaxVersion: s.version,
			Receipt: receipt(s.version), Tokens: uint32(total), CompletionTokens: uint32(s.tokens), WorkerId: w.spec.GetWorkerId(), Row: group.GetRow(),
		},
		Payload: payload, Crc32C: crc32.Checksum(payload, castagnoli),
	}
}
