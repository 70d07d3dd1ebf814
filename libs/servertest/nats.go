package servertest

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// NATSOptions has the settings of a NATS server. Credentials are alternatives; without any, every
// client is accepted.
type NATSOptions struct {
	Token          string
	User, Password string
	NKey           string // public key of the one user
	// PEM files of the client listener; "" is plain text. With ClientCA clients must have a
	// certificate of that authority.
	Cert, Key, ClientCA string
	MaxFile             string // maximum storage of a node, such as "4MB"; "": 100GB
	Nodes               int    // number of nodes of a cluster; 0: a single server
	Blackhole           string // subjects, "a.>", whose messages the first node drops
}

// NATS is one server or the nodes of a cluster, with JetStream on disk and an fsync of each stored
// message.
type NATS struct {
	Nodes []*Process
	URLs  []string // of each node
	dirs  []string
}

// URL is the list of all nodes, as clients take it.
func (n *NATS) URL() string { return strings.Join(n.URLs, ",") }

// Node is the node of a server name, as JetStream names leaders.
func (n *NATS) Node(t testing.TB, name string) *Process {
	t.Helper()
	for i, p := range n.Nodes {
		if nodeName(i) == name {
			return p
		}
	}
	t.Fatalf("no node %q", name)
	return nil
}

func nodeName(i int) string { return fmt.Sprintf("node-%d", i) }

// StartNATS starts the server or cluster and returns when JetStream works.
func StartNATS(t testing.TB, o NATSOptions) *NATS {
	t.Helper()
	nodes := max(1, o.Nodes)
	ports := freePorts(t, 3*nodes)
	n := &NATS{}
	scheme := "nats"
	if o.Cert != "" {
		scheme = "tls"
	}
	var routes []string
	for i := range nodes {
		routes = append(routes, fmt.Sprintf("%q", "nats://"+local(ports[3*i+1])))
	}
	for i := range nodes {
		client, cluster, monitor := ports[3*i], ports[3*i+1], ports[3*i+2]
		dir := t.TempDir()
		config := fmt.Sprintf("server_name: %s\nlisten: %q\nhttp: %q\n%s%s"+
			"jetstream { store_dir: %q, sync_interval: always, max_mem: 64MB, max_file: %s }\nmax_payload: 8MB\nmax_pending: 256MB\n",
			nodeName(i), local(client), local(monitor), o.authorization(), o.tls(), dir, cmp.Or(o.MaxFile, "100GB"))
		if nodes > 1 {
			config += fmt.Sprintf("cluster { name: test, listen: %q, routes: [%s] }\n", local(cluster), strings.Join(routes, ", "))
		}
		if i == 0 && o.Blackhole != "" {
			config += fmt.Sprintf("mappings { %q: %q }\n", o.Blackhole, "blackhole.>")
		}
		path := filepath.Join(dir, "server.conf")
		if err := os.WriteFile(path, []byte(config), 0o600); err != nil {
			t.Fatal(err)
		}
		n.URLs = append(n.URLs, scheme+"://"+"127.0.0.1:"+strconv.Itoa(client))
		n.dirs = append(n.dirs, dir)
		p := &Process{t: t, name: "nats-server", args: []string{"-c", path}, log: &output{}, ready: func() error { return healthy(local(monitor)) }}
		n.Nodes = append(n.Nodes, p)
		p.Launch() // a cluster gets ready only together
		t.Cleanup(func() {
			p.Kill()
			if t.Failed() {
				t.Logf("the last of the log of NATS node %d:\n%s", i, p.log.tail())
			}
		})
	}
	for _, p := range n.Nodes {
		p.Await()
	}
	return n
}

func (o NATSOptions) authorization() string {
	switch {
	case o.Token != "":
		return fmt.Sprintf("authorization { token: %q }\n", o.Token)
	case o.User != "":
		return fmt.Sprintf("authorization { users: [ { user: %q, password: %q } ] }\n", o.User, o.Password)
	case o.NKey != "":
		return fmt.Sprintf("authorization { users: [ { nkey: %s } ] }\n", o.NKey)
	}
	return ""
}

func (o NATSOptions) tls() string {
	if o.Cert == "" {
		return ""
	}
	verify := ""
	if o.ClientCA != "" {
		verify = fmt.Sprintf(", ca_file: %q, verify: true", o.ClientCA)
	}
	return fmt.Sprintf("tls { cert_file: %q, key_file: %q%s }\n", o.Cert, o.Key, verify)
}

// healthy asks the monitoring port whether JetStream serves and, in a cluster, follows its leader.
func healthy(address string) error {
	resp, err := http.Get("http://" + address + "/healthz")
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	var status struct {
		Status string `json:"status"`
		Error  string `json:"error"`
	}
	if err := json.NewDecoder(resp.Body).Decode(&status); err != nil {
		return err
	}
	if status.Status != "ok" {
		return fmt.Errorf("%s: %s", status.Status, status.Error)
	}
	return nil
}
