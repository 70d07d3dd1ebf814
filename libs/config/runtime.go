package config

import (
	"encoding/json"
	"fmt"
	"os"

	"github.com/rollout-rl/rollout/libs/atomicfile"
)

// Runtime is rolloutd.json: how to reach a running rolloutd. It is there exactly while every target
// serves.
type Runtime struct {
	PID       int      `json:"pid"`
	GRPC      string   `json:"grpc"`              // host:port
	Gateway   string   `json:"gateway,omitempty"` // base URL, where the gateway is hosted
	NATS      string   `json:"nats"`              // URL
	Consul    string   `json:"consul"`            // host:port, or an URL where it speaks TLS
	TokenFile string   `json:"token_file"`
	CAFile    string   `json:"ca_file,omitempty"` // of TLS: whom to trust
	CertFile  string   `json:"cert_file,omitempty"`
	KeyFile   string   `json:"key_file,omitempty"`
	Version   string   `json:"version"`
	Targets   []string `json:"targets"`
}

// WriteRuntime writes the file atomically. Only the owner can read it.
func WriteRuntime(path string, r Runtime) error {
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	if err := atomicfile.Write(path, append(data, '\n'), 0o600); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}

// ReadRuntime reads the file. An error that is fs.ErrNotExist means that no rolloutd runs. A killed
// process leaves its file, so readers must try the address.
func ReadRuntime(path string) (Runtime, error) {
	var r Runtime
	data, err := os.ReadFile(path)
	if err != nil {
		return r, fmt.Errorf("read rolloutd's runtime file: %w", err)
	}
	if err := json.Unmarshal(data, &r); err != nil {
		return r, fmt.Errorf("read %s: %w", path, err)
	}
	return r, nil
}
