// Package discoverytest is the suite that every agent passes which discovery.Client may talk to:
// the embedded registry and a real Consul. Service names are unique in each call, so an agent in
// use may be checked too.
package discoverytest

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	consul "github.com/hashicorp/consul/api"

	"github.com/rollout-rl/rollout/libs/discovery"
	"github.com/rollout-rl/rollout/libs/id"
)

// Agent is how to reach the agent under test.
type Agent struct {
	Address string // host:port
	Token   string // "" if the agent needs none
	// Reap is the shortest DeregisterCriticalServiceAfter that it takes, and how long it may take
	// beyond that; 0 is 2 s and a minute.
	Reap, ReapSlack time.Duration
}

// Run checks the agent.
func Run(t *testing.T, a Agent) {
	for name, test := range map[string]func(*testing.T, *bundle){
		"RegisterLookupDeregister":     registerLookupDeregister,
		"WatchSeesComeAndGo":           watchSeesComeAndGo,
		"SilenceTurnsCritical":         silenceTurnsCritical,
		"ForgottenServiceComesBack":    forgottenComesBack,
		"SameIDReplaces":               sameIDReplaces,
		"TagsAndPassingFilter":         tagsAndPassing,
		"BlockingQueryReturnsAtWait":   blockingReturnsAtWait,
		"CatalogAndAgentViews":         views,
		"WarningIsNotPassing":          warning,
		"UnknownCheckAndServiceFail":   unknown,
		"IDsWithSlashes":               slashes,
		"BadRegistrationsFailAtOnce":   badRegistrations,
		"ManyWatchersOfOneService":     manyWatchers,
		"CriticalAtFirstWithoutStatus": criticalAtFirst,
		"WrongTokenIsDenied":           wrongToken,
		"DeadAreDeregistered":          reaped,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, setup(t, a))
		})
	}
}

// bundle has the parts that each test uses.
type bundle struct {
	agent  Agent
	client *discovery.Client
	api    *consul.Client
	name   string // a service name that only this test uses
}

func setup(t *testing.T, a Agent) *bundle {
	t.Helper()
	client, err := discovery.NewClient(discovery.Options{Address: a.Address, Token: a.Token})
	if err != nil {
		t.Fatal(err)
	}
	api, err := consul.NewClient(&consul.Config{Address: a.Address, Scheme: "http", Token: a.Token})
	if err != nil {
		t.Fatal(err)
	}
	if err := client.Ready(t.Context()); err != nil {
		t.Fatal(err)
	}
	return &bundle{a, client, api, "svc-" + id.New(time.Now())}
}

func (b *bundle) service(n string, port int) discovery.Service {
	return discovery.Service{Name: b.name, ID: b.name + "-" + n, Address: "127.0.0.1", Port: port, Meta: map[string]string{"n": n}}
}

// register keeps a service until the returned stop, which waits for the deregistration.
func (b *bundle) register(t *testing.T, s discovery.Service) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	r, err := b.client.Register(ctx, s)
	if err != nil {
		t.Fatal(err)
	}
	stop = func() { cancel(); r.Wait() }
	t.Cleanup(stop)
	return stop
}

// raw registers without anybody to renew.
func (b *bundle) raw(t *testing.T, n, ttl, status string, tags ...string) string {
	t.Helper()
	service := b.name + "-" + n
	err := b.api.Agent().ServiceRegister(&consul.AgentServiceRegistration{
		ID: service, Name: b.name, Address: "127.0.0.1", Port: 1, Tags: tags,
		Check: &consul.AgentServiceCheck{CheckID: "service:" + service, TTL: ttl, Status: status},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = b.api.Agent().ServiceDeregister(service) })
	return service
}

// ids gives the last part of each id.
func (b *bundle) ids(list []discovery.Instance) []string {
	out := []string{}
	for _, i := range list {
		out = append(out, i.ID[len(b.name)+1:])
	}
	return out
}

// await reads the watch until it has exactly the wanted ids.
func (b *bundle) await(t *testing.T, watch <-chan []discovery.Instance, want ...string) []discovery.Instance {
	t.Helper()
	timeout := time.NewTimer(time.Minute)
	defer timeout.Stop()
	var seen [][]string
	for {
		select {
		case list := <-watch:
			got := b.ids(list)
			if slices.Equal(got, append([]string{}, want...)) {
				return list
			}
			seen = append(seen, got)
		case <-timeout.C:
			t.Fatalf("waited for %v, saw %v", want, seen)
		}
	}
}

func registerLookupDeregister(t *testing.T, b *bundle) {
	if list, err := b.client.Lookup(t.Context(), b.name); err != nil || len(list) != 0 {
		t.Fatalf("before: %v %v", list, err)
	}
	s := b.service("a", 4001)
	s.Tags = []string{"blue"}
	stop := b.register(t, s)
	list, err := b.client.Lookup(t.Context(), b.name)
	if err != nil || len(list) != 1 {
		t.Fatalf("registered: %v %v", list, err)
	}
	i := list[0]
	if i.Name != b.name || i.ID != s.ID || i.Address != "127.0.0.1:4001" || i.Meta["n"] != "a" || !slices.Equal(i.Tags, s.Tags) {
		t.Errorf("instance %+v", i)
	}
	stop()
	if list, err := b.client.Lookup(t.Context(), b.name); err != nil || len(list) != 0 {
		t.Errorf("after: %v %v", list, err)
	}
}

func watchSeesComeAndGo(t *testing.T, b *bundle) {
	watch := b.client.Watch(t.Context(), b.name)
	b.await(t, watch)
	stopA := b.register(t, b.service("a", 1))
	b.await(t, watch, "a")
	stopB := b.register(t, b.service("b", 2))
	b.await(t, watch, "a", "b")
	stopA()
	b.await(t, watch, "b")
	stopB()
	b.await(t, watch)
}

func silenceTurnsCritical(t *testing.T, b *bundle) {
	watch := b.client.Watch(t.Context(), b.name)
	b.await(t, watch)
	service := b.raw(t, "silent", "1s", consul.HealthPassing)
	b.await(t, watch, "silent")
	b.await(t, watch) // without a renewal
	checks, _, err := b.api.Health().Checks(b.name, nil)
	if err != nil || len(checks) != 1 || checks[0].Status != consul.HealthCritical {
		t.Fatalf("checks %+v %v", checks, err)
	}
	if err := b.api.Agent().UpdateTTL("service:"+service, "back", consul.HealthPassing); err != nil {
		t.Fatal(err)
	}
	b.await(t, watch, "silent")
}

func forgottenComesBack(t *testing.T, b *bundle) {
	s := b.service("a", 1)
	s.TTL = 600 * time.Millisecond
	b.register(t, s)
	first := b.created(t, 0)
	if err := b.api.Agent().ServiceDeregister(s.ID); err != nil { // without using the client
		t.Fatal(err)
	}
	b.created(t, first)
	b.await(t, b.client.Watch(t.Context(), b.name), "a")
}

// created waits for an instance that was registered after an index, and returns its index. A gap in
// between may be missed: the next renewal can come at once.
func (b *bundle) created(t *testing.T, after uint64) uint64 {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for index := uint64(0); ; {
		list, meta, err := b.api.Health().Service(b.name, "", false, (&consul.QueryOptions{WaitIndex: index, WaitTime: time.Minute}).WithContext(ctx))
		if err != nil {
			t.Fatalf("no instance after index %d: %v", after, err)
		}
		if len(list) == 1 && list[0].Service.CreateIndex > after {
			return list[0].Service.CreateIndex
		}
		index = meta.LastIndex
	}
}

func sameIDReplaces(t *testing.T, b *bundle) {
	b.register(t, b.service("a", 1))
	watch := b.client.Watch(t.Context(), b.name)
	b.await(t, watch, "a")
	b.register(t, b.service("a", 2))
	if list := b.await(t, watch, "a"); list[0].Address != "127.0.0.1:2" {
		t.Errorf("address %s", list[0].Address)
	}
}

func tagsAndPassing(t *testing.T, b *bundle) {
	b.raw(t, "good", "1h", consul.HealthPassing, "gpu", "eu")
	b.raw(t, "bad", "1h", consul.HealthCritical, "gpu")
	for _, c := range []struct {
		tags    []string
		passing bool
		want    int
	}{{nil, false, 2}, {nil, true, 1}, {[]string{"gpu"}, false, 2}, {[]string{"gpu", "eu"}, false, 1}, {[]string{"tpu"}, false, 0}} {
		list, _, err := b.api.Health().ServiceMultipleTags(b.name, c.tags, c.passing, nil)
		if err != nil || len(list) != c.want {
			t.Errorf("tags %v passing %v: %d instances, want %d (%v)", c.tags, c.passing, len(list), c.want, err)
		}
	}
}

func blockingReturnsAtWait(t *testing.T, b *bundle) {
	b.raw(t, "a", "1h", consul.HealthPassing)
	_, meta, err := b.api.Health().Service(b.name, "", true, nil)
	if err != nil || meta.LastIndex == 0 {
		t.Fatalf("index %+v %v", meta, err)
	}
	began := time.Now()
	list, again, err := b.api.Health().Service(b.name, "", true, &consul.QueryOptions{WaitIndex: meta.LastIndex, WaitTime: 200 * time.Millisecond})
	if err != nil || len(list) != 1 || again.LastIndex != meta.LastIndex {
		t.Errorf("%d instances, index %d after %d: %v", len(list), again.LastIndex, meta.LastIndex, err)
	}
	if d := time.Since(began); d < 150*time.Millisecond {
		t.Errorf("returned after %v without a change", d)
	}
}

func views(t *testing.T, b *bundle) {
	service := b.raw(t, "a", "1h", consul.HealthPassing, "gpu")
	agent, err := b.api.Agent().Services()
	if err != nil || agent[service] == nil || agent[service].Service != b.name {
		t.Errorf("agent services: %v", err)
	}
	checks, err := b.api.Agent().Checks()
	if c := checks["service:"+service]; err != nil || c == nil || c.Status != consul.HealthPassing || c.ServiceID != service {
		t.Errorf("agent checks: %+v %v", c, err)
	}
	one, _, err := b.api.Agent().Service(service, nil)
	if err != nil || one.Port != 1 {
		t.Errorf("agent service: %+v %v", one, err)
	}
	names, _, err := b.api.Catalog().Services(nil)
	if err != nil || !slices.Equal(names[b.name], []string{"gpu"}) {
		t.Errorf("catalog services: %v %v", names[b.name], err)
	}
	rows, _, err := b.api.Catalog().Service(b.name, "gpu", nil)
	if err != nil || len(rows) != 1 || rows[0].ServiceID != service || rows[0].ServiceAddress != "127.0.0.1" {
		t.Errorf("catalog service: %+v %v", rows, err)
	}
	if leader, err := b.api.Status().Leader(); err != nil || leader == "" {
		t.Errorf("leader %q %v", leader, err)
	}
	if self, err := b.api.Agent().Self(); err != nil || self["Config"]["NodeName"] == "" {
		t.Errorf("self: %v", err)
	}
}

func warning(t *testing.T, b *bundle) {
	service := b.raw(t, "a", "1h", consul.HealthPassing)
	watch := b.client.Watch(t.Context(), b.name)
	b.await(t, watch, "a")
	if err := b.api.Agent().WarnTTL("service:"+service, "busy"); err != nil {
		t.Fatal(err)
	}
	b.await(t, watch)
	if err := b.api.Agent().PassTTL("service:"+service, ""); err != nil {
		t.Fatal(err)
	}
	b.await(t, watch, "a")
	if err := b.api.Agent().FailTTL("service:"+service, "broken"); err != nil {
		t.Fatal(err)
	}
	b.await(t, watch)
}

func unknown(t *testing.T, b *bundle) {
	var status consul.StatusError
	if err := b.api.Agent().UpdateTTL("service:none-"+b.name, "", consul.HealthPassing); !errors.As(err, &status) {
		t.Errorf("unknown check: %v", err)
	}
	if err := b.api.Agent().ServiceDeregister("none-" + b.name); !errors.As(err, &status) || status.Code != 404 {
		t.Errorf("unknown service: %v", err)
	}
}

func slashes(t *testing.T, b *bundle) {
	s := b.service("x", 1)
	s.ID = b.name + "-run-1/inference-0"
	stop := b.register(t, s)
	watch := b.client.Watch(t.Context(), b.name)
	b.await(t, watch, "run-1/inference-0")
	stop()
	b.await(t, watch)
}

func badRegistrations(t *testing.T, b *bundle) {
	for _, s := range []discovery.Service{{}, {Name: b.name}, {Name: b.name, ID: "x", Address: "127.0.0.1"}} {
		if _, err := b.client.Register(t.Context(), s); !errors.Is(err, discovery.ErrService) {
			t.Errorf("%+v: %v", s, err)
		}
	}
	err := b.api.Agent().ServiceRegister(&consul.AgentServiceRegistration{
		Name: b.name, Check: &consul.AgentServiceCheck{TTL: "soon"},
	})
	var status consul.StatusError
	if !errors.As(err, &status) || status.Code != 400 {
		t.Errorf("an invalid TTL: %v", err)
	}
}

func manyWatchers(t *testing.T, b *bundle) {
	var watches []<-chan []discovery.Instance
	for range 8 {
		w := b.client.Watch(t.Context(), b.name)
		b.await(t, w)
		watches = append(watches, w)
	}
	b.register(t, b.service("a", 1))
	for _, w := range watches {
		b.await(t, w, "a")
	}
}

func criticalAtFirst(t *testing.T, b *bundle) {
	service := b.raw(t, "a", "1h", "")
	if list, err := b.client.Lookup(t.Context(), b.name); err != nil || len(list) != 0 {
		t.Errorf("before the first renewal: %v %v", list, err)
	}
	if err := b.api.Agent().UpdateTTL("service:"+service, "", consul.HealthPassing); err != nil {
		t.Fatal(err)
	}
	b.await(t, b.client.Watch(t.Context(), b.name), "a")
}

func wrongToken(t *testing.T, b *bundle) {
	if b.agent.Token == "" {
		return // the agent requires no certificate
	}
	for _, token := range []string{"", "00000000-0000-0000-0000-00000000dead"} {
		c, err := discovery.NewClient(discovery.Options{Address: b.agent.Address, Token: token})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Register(t.Context(), b.service("x", 1)); !errors.Is(err, discovery.ErrDenied) {
			t.Errorf("register with token %q: %v", token, err)
		}
	}
}

// reaped registers a service that stops renewing: its check becomes critical, then the agent
// removes it.
func reaped(t *testing.T, b *bundle) {
	after, slack := b.agent.Reap, b.agent.ReapSlack
	if after == 0 {
		after, slack = 2*time.Second, time.Minute
	}
	service := b.name + "-dead"
	err := b.api.Agent().ServiceRegister(&consul.AgentServiceRegistration{
		ID: service, Name: b.name, Address: "127.0.0.1", Port: 1, Check: &consul.AgentServiceCheck{
			CheckID: "service:" + service, TTL: "300ms", Status: consul.HealthPassing, DeregisterCriticalServiceAfter: after.String(),
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), after+slack)
	defer cancel()
	var index uint64
	for sawCritical := false; ; {
		checks, meta, err := b.api.Health().Checks(b.name, (&consul.QueryOptions{WaitIndex: index, WaitTime: time.Minute}).WithContext(ctx))
		if err != nil {
			t.Fatalf("still registered %v after it stopped renewing: %v", after+slack, err)
		}
		index = meta.LastIndex
		sawCritical = sawCritical || len(checks) == 1 && checks[0].Status == consul.HealthCritical
		if sawCritical && len(checks) == 0 {
			return
		}
	}
}
