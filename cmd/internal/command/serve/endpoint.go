package serve

import (
	"context"
	"errors"
	"fmt"
	"io"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/client"
	"github.com/rollout-rl/rollout/libs/exit"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	servingv1 "github.com/rollout-rl/rollout/proto/gen/rollout/serving/v1"
)

// Endpoint is a model that is served for a command. The local daemon lets this user in without a
// key; clients that insist on one send Key.
type Endpoint struct {
	URL     string // with /v1
	Name    string // of the model in requests
	Key     string
	Context uint32 // tokens of prompt and completion together
}

// Open serves the model in folder with a configuration until stop is called.
func Open(ctx context.Context, env *cli.Env, c *client.Client, config *configv1.RunConfig, folder, baseDir, name string) (at *Endpoint, stop func(), err error) {
	if !env.Plane.Local() {
		return nil, nil, exit.New(exit.Usage, "leave --server and --consul out", "suites of a library need the endpoint of the local daemon")
	}
	given := proto.CloneOf(config)
	given.Name, given.Model.Path = proto.String(name), proto.String(folder)
	w := &wanted{request: &servingv1.ServeModelRequest{Config: given, BaseDir: baseDir}}
	if err := w.check(given, folder, 0); err != nil {
		return nil, nil, err
	}
	serving, cancel := context.WithCancel(context.WithoutCancel(ctx))
	watch := &watch{env: env, client: c, wanted: w}
	ended := make(chan struct{})
	stop = func() {
		watch.stop()
		cancel()
		<-ended
	}
	interrupted := context.AfterFunc(ctx, cancel)
	defer interrupted()
	stream, err := c.Serving.ServeModel(serving, w.request)
	if err != nil {
		cancel()
		return nil, nil, err
	}
	for at == nil {
		response, err := stream.Recv()
		switch s := response.GetServing(); {
		case ctx.Err() != nil:
			cancel()
			return nil, nil, exit.New(exit.Interrupted, "the same command evaluates the suite again", "interrupted")
		case errors.Is(err, io.EOF):
			err = exit.New(exit.Unavailable, "run the same command again", "the model is not served any more")
			fallthrough
		case err != nil:
			cancel()
			return nil, nil, fmt.Errorf("serve the model: %w", err)
		case s.GetState() == servingv1.ServingState_SERVING_STATE_SERVING:
			at = &Endpoint{Name: name, Key: "none", Context: given.GetEngine().GetMaxModelLen()}
		}
	}
	go func() {
		defer close(ended)
		for {
			if _, err := stream.Recv(); err != nil {
				return
			}
		}
	}()
	gateway, err := watch.gateway()
	if err != nil {
		stop()
		return nil, nil, err
	}
	at.URL = gateway + "/v1"
	return at, stop, nil
}
