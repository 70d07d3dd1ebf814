package scheduler

import "sync"

// lines are the connections to the workers that are asked, kept from one look to the next.
type lines struct {
	mu    sync.Mutex
	conns map[string]Conn // by address
}

// to is the connection to an address.
func (l *lines) to(address string, dial func(string) (Conn, error)) (Conn, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if conn, open := l.conns[address]; open {
		return conn, nil
	}
	conn, err := dial(address)
	if err != nil {
		return nil, err
	}
	if l.conns == nil {
		l.conns = map[string]Conn{}
	}
	l.conns[address] = conn
	return conn, nil
}

// keep closes the connections to everybody but these.
func (l *lines) keep(workers map[string]workerView) {
	wanted := map[string]bool{}
	for _, w := range workers {
		wanted[w.address] = true
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for address, conn := range l.conns {
		if !wanted[address] {
			_ = conn.Close()
			delete(l.conns, address)
		}
	}
}
