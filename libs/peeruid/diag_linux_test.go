package peeruid

import (
	"net"
	"os"
	"testing"
)

// One question finds a socket, also one of IPv6 that is connected by IPv4, and no closed one.
func TestAskFindsOneSocket(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ listen, dial string }{{"127.0.0.1", "127.0.0.1"}, {"::1", "::1"}, {"::", "127.0.0.1"}} {
		t.Run(c.listen+" "+c.dial, func(t *testing.T) {
			t.Parallel()
			listener, err := net.Listen("tcp", net.JoinHostPort(c.listen, "0"))
			if err != nil {
				t.Skipf("this host cannot listen on %s: %v", c.listen, err)
			}
			defer listener.Close()
			_, port, _ := net.SplitHostPort(listener.Addr().String())
			client, err := net.Dial("tcp", net.JoinHostPort(c.dial, port))
			if err != nil {
				t.Fatal(err)
			}
			defer client.Close()
			server, err := listener.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer server.Close()
			peer, own := address(server.RemoteAddr()), address(server.LocalAddr())
			if uid, ok := ask(peer, own); !ok || int(uid) != os.Geteuid() {
				t.Errorf("uid %d, known %t; want %d", uid, ok, os.Geteuid())
			}
			client.Close()
			if uid, ok := ask(peer, own); ok {
				t.Errorf("a closed socket belongs to %d", uid)
			}
		})
	}
}
