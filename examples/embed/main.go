// Command embed hosts the buffer and the storage service inside a program, without rolloutd: it
// puts a group of samples, leases it as the batch of a step, commits the step, and stores an
// artifact and an event.
//
//	go run ./examples/embed/main.go -state /tmp/embed          # in a checkout
//	go get github.com/rollout-rl/rollout/services@latest       # in your own module
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"path/filepath"
	"sync"
	"time"

	"github.com/rollout-rl/rollout/libs/blob"
	"github.com/rollout-rl/rollout/libs/blob/files"
	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/rpc"
	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/proto/gen/names"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
	"github.com/rollout-rl/rollout/services/buffer"
	"github.com/rollout-rl/rollout/services/buffer/segment"
	bufferstore "github.com/rollout-rl/rollout/services/buffer/sqlstore"
	"github.com/rollout-rl/rollout/services/storage"
	storagestore "github.com/rollout-rl/rollout/services/storage/sqlstore"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
)

const samples = 4 // per group

func main() {
	state := flag.String("state", "embed-state", "folder of the databases, segments, and artifacts")
	flag.Parse()
	if err := run(context.Background(), *state); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, state string) error {
	ledgers, err := bufferstore.Open(ctx, sqldb.Files(state))
	if err != nil {
		return err
	}
	defer ledgers.Close()
	ledger, err := buffer.New(buffer.Config{Segments: filepath.Join(state, "segments")}, buffer.Deps{Store: ledgers})
	if err != nil {
		return err
	}
	events, err := storagestore.Open(ctx, sqldb.Files(state))
	if err != nil {
		return err
	}
	defer events.Close()
	blobs, err := files.Open(filepath.Join(state, "artifacts"))
	if err != nil {
		return err
	}
	archive, err := storage.New(storage.Config{}, storage.Deps{Store: events, Artifacts: blob.NewCAS(blobs, state)})
	if err != nil {
		return err
	}
	server, err := rpc.NewServer(rpc.ServerOptions{})
	if err != nil {
		return err
	}
	ledger.Register(server)
	archive.Register(server)

	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	for _, serve := range []func(context.Context) error{ledger.Run, archive.Run, server.Run} {
		running.Go(func() {
			if err := serve(ctx); err != nil {
				log.Print(err)
			}
		})
	}
	return use(ctx, server)
}

// use calls both services over connections in memory. With server.Listen, other processes could
// call them, too.
func use(ctx context.Context, server *rpc.Server) error {
	dialer := rpc.NewDialer(rpc.DialerOptions{Local: server, Hosted: []string{names.BufferService, names.StorageService}})
	defer dialer.Close()
	ledger, err := dialer.Conn(names.BufferService)
	if err != nil {
		return err
	}
	archive, err := dialer.Conn(names.StorageService)
	if err != nil {
		return err
	}
	name := id.NewRun(time.Now())
	if err := train(ctx, bufferv1.NewBufferServiceClient(ledger), name); err != nil {
		return fmt.Errorf("buffer: %w", err)
	}
	if err := record(ctx, storagev1.NewArtifactServiceClient(archive), storagev1.NewEventServiceClient(archive), name); err != nil {
		return fmt.Errorf("storage: %w", err)
	}
	return nil
}

// train puts one group, leases it as the batch of step 1, reads it, and commits the step.
func train(ctx context.Context, ledger bufferv1.BufferServiceClient, run string) error {
	config := &bufferv1.LedgerConfig{GroupsPerStep: 1, GroupSize: samples, Rows: 1, Order: bufferv1.LeaseOrder_LEASE_ORDER_POSITION}
	if _, err := ledger.OpenLedger(ctx, &bufferv1.OpenLedgerRequest{RunId: run, Config: config}); err != nil {
		return err
	}
	group, err := groupOf(run)
	if err != nil {
		return err
	}
	put, err := ledger.PutTrajectories(ctx, &bufferv1.PutTrajectoriesRequest{RunId: run, Puts: []*trajectoryv1.TrajectoryBatch{group}})
	if err != nil {
		return err
	}
	leased, err := ledger.LeaseBatch(ctx, &bufferv1.LeaseBatchRequest{RunId: run, Step: 1, WaitSeconds: 10})
	if err != nil {
		return err
	}
	if leased.GetBatch() == nil {
		return fmt.Errorf("step 1 waits for %v", leased.GetWaits())
	}
	read, err := payloads(ctx, ledger, run)
	if err != nil {
		return err
	}
	_, err = ledger.CommitStep(ctx, &bufferv1.CommitStepRequest{
		RunId: run, Step: 1, BatchId: leased.GetBatch().GetBatchId(), WeightsDigest: id.Content([]byte("weights after step 1")),
	})
	fmt.Printf("buffer: %d samples accepted, %d read, step 1 committed\n", put.GetResults()[0].GetAccepted(), len(read))
	return err
}

// groupOf is a group of samples without tokens.
func groupOf(run string) (*trajectoryv1.TrajectoryBatch, error) {
	group := &trajectoryv1.TrajectoryBatch{}
	for n := range uint32(samples) {
		key := &trajectoryv1.TrajectoryKey{RunId: run, Sample: n}
		reward, outcome := float64(n), trajectoryv1.Outcome_OUTCOME_COMPLETED
		payload, err := proto.Marshal(&trajectoryv1.Trajectory{Key: key, Reward: reward, Outcome: outcome})
		if err != nil {
			return nil, err
		}
		group.Trajectories = append(group.Trajectories, &trajectoryv1.TrajectoryEnvelope{
			Header:  &trajectoryv1.TrajectoryHeader{Key: key, GroupSize: samples, Outcome: outcome, Reward: reward},
			Payload: payload, Crc32C: segment.CRC(payload),
		})
	}
	return group, nil
}

func payloads(ctx context.Context, ledger bufferv1.BufferServiceClient, run string) (all [][]byte, err error) {
	stream, err := ledger.ReadPayloads(ctx, &bufferv1.ReadPayloadsRequest{RunId: run, Step: 1})
	for err == nil {
		var part *bufferv1.ReadPayloadsResponse
		part, err = stream.Recv()
		all = append(all, part.GetPayloads()...)
	}
	if errors.Is(err, io.EOF) {
		return all, nil
	}
	return nil, err
}

// record stores an artifact and an event, and reads them.
func record(ctx context.Context, artifacts storagev1.ArtifactServiceClient, events storagev1.EventServiceClient, run string) error {
	put, err := artifacts.PutArtifact(ctx)
	if err != nil {
		return err
	}
	if err := put.Send(&storagev1.PutArtifactRequest{Chunk: []byte("notes about step 1")}); err != nil {
		return err
	}
	stored, err := put.CloseAndRecv()
	if err != nil {
		return err
	}
	get, err := artifacts.GetArtifact(ctx, &storagev1.GetArtifactRequest{ContentId: stored.GetContentId()})
	if err != nil {
		return err
	}
	chunk, err := get.Recv()
	if err != nil {
		return err
	}
	event := &eventv1.Event{EventId: id.New(time.Now()), RunId: run, Time: timestamppb.Now(), Service: "embed", Kind: "log", Message: "step 1"}
	if _, err := events.AppendEvents(ctx, &storagev1.AppendEventsRequest{Events: []*eventv1.Event{event}}); err != nil {
		return err
	}
	listed, err := events.ListEvents(ctx, &storagev1.ListEventsRequest{Filter: &storagev1.EventFilter{RunId: run}})
	if err != nil {
		return err
	}
	fmt.Printf("storage: %q read, %d event listed\n", chunk.GetChunk(), len(listed.GetEvents()))
	return nil
}
