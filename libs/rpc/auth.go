package rpc

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/apikey"
	"github.com/rollout-rl/rollout/libs/cert"
	"github.com/rollout-rl/rollout/libs/credential"
	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// Errors of the token, compared with errors.Is.
var (
	ErrUnauthenticated = rpcerr.New(codes.Unauthenticated, rpcerr.ReasonUnauthenticated,
		"the call has no valid credential: neither the mesh token, which is in the token file that rolloutd.json names, nor an API key that is in force")
	ErrTokenFile = rpcerr.New(codes.FailedPrecondition, "TOKEN_FILE",
		"the token file must be readable by its owner alone (mode 0600) and hold one line")
	ErrTokenMissing = rpcerr.New(codes.NotFound, "TOKEN_MISSING", "there is no such token file").
			Fix("name the mesh's token file with token_file, or leave the key out: one is made in the state folder")
)

const (
	header     = "authorization"
	bearer     = "Bearer "
	tokenBytes = 32
)

// authenticator authenticates callers. The mesh token allows every call, an API key those of its
// scope.
type authenticator struct {
	token   string
	keys    *apikey.Ring // nil without API keys
	workers *credential.Authority
}

// check returns the context of the call, with its key.
func (a authenticator) check(ctx context.Context, method string) (context.Context, error) {
	if a.token == "" || strings.HasPrefix(method, "/"+healthpb.Health_ServiceDesc.ServiceName+"/") {
		return ctx, nil
	}
	md, _ := metadata.FromIncomingContext(ctx)
	values := md.Get(header)
	if len(values) != 1 {
		return ctx, ErrUnauthenticated
	}
	if subtle.ConstantTimeCompare([]byte(values[0]), []byte(bearer+a.token)) == 1 {
		if err := notAPerson(ctx); err != nil {
			return ctx, err
		}
		return onBehalf(ctx, md.Get(callerHeader))
	}
	key, ok := strings.CutPrefix(values[0], bearer)
	if as, worker, err := a.asWorker(ctx, method, key); worker {
		return as, err
	}
	if !ok || a.keys == nil {
		return ctx, ErrUnauthenticated
	}
	record, err := a.keys.Find(ctx, key)
	if err != nil {
		return ctx, err
	}
	if record == nil {
		return ctx, ErrUnauthenticated
	}
	if needed := scopeOf(method); !apikey.Scope(record.GetScope()).Allows(needed) {
		return ctx, insufficient(record, needed)
	}
	return apikey.With(ctx, record), nil
}

// callerHeader has the key of the caller for whom a process calls another one (an apikey.Record).
// It counts together with the mesh token only.
const callerHeader = "rollout-caller-bin"

// onBehalf gives a call that one process makes for the caller of another the key of that caller: a
// replica forwards calls to the leader, and a service asks others on behalf of its caller. So they
// see the runs of its project only.
func onBehalf(ctx context.Context, values []string) (context.Context, error) {
	if len(values) == 0 {
		return ctx, nil
	}
	key := &apikey.Record{}
	if err := proto.Unmarshal([]byte(values[0]), key); err != nil || len(values) > 1 {
		return ctx, ErrUnauthenticated.WithMessage("the header %s is not valid", callerHeader)
	}
	return apikey.With(ctx, key), nil
}

// notAPerson refuses the mesh token from callers with a person's certificate. People must use keys,
// which have scopes.
func notAPerson(ctx context.Context) error {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return nil
	}
	info, ok := p.AuthInfo.(credentials.TLSInfo)
	if !ok || len(info.State.PeerCertificates) == 0 {
		return nil
	}
	if id, known := cert.Of(info.State.PeerCertificates[0]); known && id.Kind == cert.Person {
		return ErrUnauthenticated.WithMessage("the mesh token came with the certificate of the person %s", id.Name).
			Fix("call with an API key: ROLLOUT_API_KEY; `rollout keys create` makes one")
	}
	return nil
}

func (a authenticator) stream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
	ctx, err := a.check(ss.Context(), info.FullMethod)
	if err != nil {
		return err
	}
	return next(srv, keyed{ServerStream: ss, ctx: ctx})
}

// keyed is a stream whose context has the key of the caller.
type keyed struct {
	grpc.ServerStream
	ctx context.Context //nolint:containedctx // a stream's Context method returns it
}

func (k keyed) Context() context.Context { return k.ctx }

// perCall adds the token to each call.
type perCall struct {
	token     string
	toService bool // calls carry the key of the caller that they are made for
}

func (p perCall) GetRequestMetadata(ctx context.Context, _ ...string) (map[string]string, error) {
	if p.token == "" {
		return nil, nil
	}
	out := map[string]string{header: bearer + p.token}
	if key := apikey.From(ctx); key != nil && p.toService {
		caller, err := proto.Marshal(&apikey.Record{Name: key.GetName(), Scope: key.GetScope(), Project: key.GetProject()})
		if err != nil {
			return nil, fmt.Errorf("send the key's name: %w", err)
		}
		out[callerHeader] = string(caller)
	}
	return out, nil
}

// RequireTransportSecurity returns false, because on loopback the token is sent in plain text
// between processes of one user.
func (p perCall) RequireTransportSecurity() bool { return false }

// ReadToken reads a token file. It refuses one that others may read (ErrTokenFile).
func ReadToken(path string) (string, error) {
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return "", ErrTokenMissing.WithMessage("read token file").Wrap(err)
	}
	if err != nil {
		return "", fmt.Errorf("read token file: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return "", fmt.Errorf("read token file: %w", err)
	}
	if info.Mode().Perm()&0o077 != 0 {
		return "", ErrTokenFile.With("path", path).WithMessage("others may read the token file %s (mode %04o, not 0600)", path, info.Mode().Perm()).
			Fix("chmod 600 " + path)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return "", fmt.Errorf("read token file: %w", err)
	}
	token := strings.TrimSpace(string(data))
	if token == "" || strings.ContainsAny(token, " \n\r\t") {
		return "", ErrTokenFile.With("path", path).WithMessage("the token file %s does not hold one line with a token", path).
			Fix("name the right file with token_file; one in the state folder is created again if it is removed")
	}
	return token, nil
}

// EnsureToken reads the token file. If it does not exist, EnsureToken creates it with 32 random
// bytes in hex. Processes that start at the same time get the same token.
func EnsureToken(path string) (string, error) {
	token, err := ReadToken(path)
	if !errors.Is(err, fs.ErrNotExist) {
		return token, err
	}
	raw := make([]byte, tokenBytes)
	rand.Read(raw)                                            // never fails
	tmp, err := os.CreateTemp(filepath.Dir(path), ".token-*") // 0600
	if err != nil {
		return "", fmt.Errorf("make token file: %w", err)
	}
	defer os.Remove(tmp.Name())
	_, err = tmp.WriteString(hex.EncodeToString(raw) + "\n")
	if err = errors.Join(err, tmp.Sync(), tmp.Close()); err != nil {
		return "", fmt.Errorf("make token file: %w", err)
	}
	if err := os.Link(tmp.Name(), path); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", fmt.Errorf("make token file: %w", err)
	}
	return ReadToken(path)
}
