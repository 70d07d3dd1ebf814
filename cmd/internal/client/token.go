package client

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"strings"

	"github.com/rollout-rl/rollout/libs/exit"
)

// bearer adds the token to each call.
type bearer string

// GetRequestMetadata is the header of a call.
func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	if b == "" {
		return nil, nil
	}
	return map[string]string{"authorization": "Bearer " + string(b)}, nil
}

// RequireTransportSecurity is false: on loopback the token travels in plain text between processes of one user.
func (b bearer) RequireTransportSecurity() bool { return false }

// readToken reads a token file, which others must not be able to read.
func readToken(path string) (string, error) {
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return "", exit.New(exit.NoInput, "name the server's token with --token-file", "there is no token file %s", path)
	}
	if err == nil && info.Mode().Perm()&0o077 != 0 {
		return "", exit.New(exit.NoInput, "make it readable by its owner alone: `chmod 600 "+path+"`", "others can read the token file %s", path)
	}
	var data []byte
	if err == nil {
		data, err = os.ReadFile(path)
	}
	if err != nil {
		return "", exit.New(exit.NoInput, "check its permissions", "can't read the token file: %w", err)
	}
	return strings.TrimSpace(string(data)), nil
}
