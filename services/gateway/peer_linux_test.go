package gateway_test

import (
	"context"
	"net"
	"net/http"
	"os"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/rollout-rl/rollout/libs/apikey"
	"github.com/rollout-rl/rollout/services/gateway"
)

// asUser is an HTTP client whose sockets belong to another user, which only root can make.
func asUser(uid int) *http.Client {
	dial := func(ctx context.Context, network, address string) (conn net.Conn, err error) {
		done := make(chan struct{})
		go func() {
			defer close(done)
			runtime.LockOSThread() // without unlocking: the thread ends with the goroutine
			if _, _, errno := syscall.RawSyscall(syscall.SYS_SETFSUID, uintptr(uid), 0, 0); errno != 0 {
				err = errno
				return
			}
			conn, err = new(net.Dialer).DialContext(ctx, network, address)
		}()
		<-done
		return conn, err
	}
	return &http.Client{Transport: &http.Transport{DialContext: dial}}
}

func TestOnLoopbackOnlyTheOwnerNeedsNoKey(t *testing.T) {
	t.Parallel()
	ring, key := keyring(t, apikey.Submit)
	trusting, _ := serve(t, gateway.Config{Keys: ring, TrustOwner: true}, &fakeWorker{model: "tiny"})
	strict, _ := serve(t, gateway.Config{Keys: ring}, &fakeWorker{model: "tiny"})
	for _, c := range []struct {
		name    string
		server  *gateway.Server
		uid     int
		key     string
		want    int
		message string
	}{
		{"the owner", trusting, os.Geteuid(), "", 200, ""},
		{"the owner with the placeholder of a client", trusting, os.Geteuid(), "sk-none", 200, ""},
		{"another user", trusting, 65534, "", 401, "only the user who runs rolloutd, and root, need no key"},
		{"another user with a wrong key", trusting, 65534, "rk-wrong", 401, "missing or incorrect API key"},
		{"another user with a key", trusting, 65534, key, 200, ""},
		{"the owner where everyone needs one", strict, os.Geteuid(), "", 401, "missing or incorrect API key"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			if c.uid != os.Geteuid() && os.Geteuid() != 0 {
				t.Skip("only root can make a socket of another user")
			}
			client := asUser(c.uid)
			defer client.CloseIdleConnections()
			for _, call := range []struct{ method, path, body string }{
				{"GET", "/v1/models", ""},
				{"POST", "/v1/completions", `{"model":"tiny","prompt":"a"}`},
			} {
				req, err := http.NewRequestWithContext(t.Context(), call.method, c.server.URL()+call.path, strings.NewReader(call.body))
				if err != nil {
					t.Fatal(err)
				}
				if c.key != "" {
					req.Header.Set("Authorization", "Bearer "+c.key)
				}
				resp, body := send(t, client, req)
				if resp.StatusCode != c.want || !strings.Contains(body, c.message) {
					t.Errorf("%s %s: %s %s", call.method, call.path, resp.Status, body)
				}
			}
		})
	}
}
