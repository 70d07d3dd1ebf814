package main

import (
	"context"
	"strings"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/rpcerr"
)

var errStranger = rpcerr.New(codes.FailedPrecondition, "ROLLOUTD_OTHER_MESH", "Consul knows the services of another mesh").
	Fix("give each mesh its own Consul (or datacenter) and NATS account; where it is to be the same mesh, give both the same token_file and start this one again")

// metaMesh is where a registration says which mesh it is of.
const metaMesh = "mesh"

// meshOf tells the meshes apart that were given one Consul, by the token that all processes of a mesh share. It is 16 bits of a hash:
// enough to see a mistake, and too few to try tokens on.
func meshOf(token string) string {
	digest := id.Content([]byte("rollout mesh\x00" + token))
	return digest[strings.LastIndex(digest, "-")+1:][:4]
}

// refuseStrangers looks whether services of another mesh are registered where ours are about to be: calls would go to either.
func (m *mesh) refuseStrangers(ctx context.Context) error {
	for _, t := range targets {
		if t.make == nil {
			continue
		}
		known, err := m.discovery.Lookup(ctx, t.name)
		if err != nil {
			return err
		}
		for _, other := range known {
			if mesh := other.Meta[metaMesh]; mesh != "" && mesh != m.meta[metaMesh] {
				return errStranger.WithMessage("%s at %s is of another mesh: its token is not ours", t.name, other.Address)
			}
		}
	}
	return nil
}
