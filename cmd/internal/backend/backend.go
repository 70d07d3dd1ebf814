// Package backend connects to the servers of rolloutd.toml, for rolloutd and `rollout doctor`.
package backend

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"time"

	"github.com/rollout-rl/rollout/libs/blob"
	"github.com/rollout-rl/rollout/libs/blob/gcs"
	"github.com/rollout-rl/rollout/libs/blob/s3"
	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/libs/cert"
	"github.com/rollout-rl/rollout/libs/config"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/sqldb"
)

// NATS returns options with the configured credentials, else with the token of the control plane.
// The caller sets URL and Log.
func NATS(c config.NATS, meshToken string, environ []string) (o bus.Options, err error) {
	o.User, o.Replicas = c.User, c.Replicas
	if o.Token, err = c.Token.Read("nats.token", environ); err != nil {
		return o, err
	}
	if o.Password, err = c.Password.Read("nats.password", environ); err != nil {
		return o, err
	}
	if o.NKeySeed, err = c.NKey.Read("nats.nkey", environ); err != nil {
		return o, err
	}
	if o.Token+o.User+o.NKeySeed == "" {
		o.Token = meshToken
	}
	o.TLS, err = TLS("nats", c.CAFile, c.CertFile, c.KeyFile, o.Log)
	return o, err
}

// TLS returns the authority and the client certificate for the server of a configuration table; nil
// if neither is set. Renewed files are reloaded.
func TLS(table, ca, certificate, key string, log *slog.Logger) (*cert.Source, error) {
	if ca == "" && certificate == "" {
		return nil, nil
	}
	s, err := cert.Open(cert.Files{Cert: certificate, Key: key, CA: ca}, log)
	if err != nil {
		return nil, fmt.Errorf("[%s]: %w", table, err)
	}
	return s, nil
}

// Databases is where the services keep their state.
func Databases(cfg config.Config, environ []string) (sqldb.Place, error) {
	url, err := cfg.Database.Postgres(environ)
	if err != nil {
		return nil, err
	}
	if url == "" {
		return sqldb.Files(filepath.Join(cfg.StateDir, "db")), nil
	}
	return sqldb.Postgres{
		URL: url, Prefix: cfg.Database.SchemaPrefix, MaxConnections: cfg.Database.MaxConnections,
		StatementTimeout: time.Duration(cfg.Database.StatementTimeout) * time.Second,
	}, nil
}

// Bucket opens the configured bucket; nil if blobs are files. It requests a blob that does not
// exist, so that a missing bucket or denied access is an error here.
func Bucket(ctx context.Context, c config.Blob, environ []string) (blob.Store, error) {
	bucket := c.Bucket()
	var store blob.Store
	var err error
	switch bucket.Kind {
	case "s3":
		var secret string
		if secret, err = c.SecretKey.Read("blob.secret_key", environ); err != nil {
			return nil, err
		}
		store, err = s3.Open(ctx, s3.Config{
			Bucket: bucket.Name, Prefix: bucket.Prefix, Region: c.Region, Endpoint: c.Endpoint, AccessKey: c.AccessKey, SecretKey: secret,
			Access: keys(c),
		})
	case "gs":
		var credentials string
		if credentials, err = c.Credentials.Read("blob.credentials", environ); err != nil {
			return nil, err
		}
		store, err = gcs.Open(ctx, gcs.Config{
			Bucket: bucket.Name, Prefix: bucket.Prefix, Endpoint: c.Endpoint, Credentials: credentials,
			Access: file(c),
		})
	default:
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	for _, err := range store.List(ctx, "none/") {
		if err != nil {
			return nil, explained(bucket.Kind+"://"+bucket.Name, err)
		}
		break
	}
	return store, nil
}

// keys says where the keys of S3 come from.
func keys(c config.Blob) string {
	if c.AccessKey == "" {
		return "those of AWS's own chain: AWS_ACCESS_KEY_ID, a profile, or the role of the host; blob.access_key and blob.secret_key name others"
	}
	return fmt.Sprintf("blob.access_key is %q, and blob.secret_key is read from %s", c.AccessKey, c.SecretKey)
}

// file says where the credentials of GCS come from.
func file(c config.Blob) string {
	if c.Credentials == (config.Ref{}) {
		return "the default ones of the host: GOOGLE_APPLICATION_CREDENTIALS, gcloud, or its service account; blob.credentials names others"
	}
	return fmt.Sprintf("blob.credentials is read from %s", c.Credentials)
}

// explained adds the bucket and a fix to an error.
func explained(name string, err error) error {
	if rpcerr.Fix(err) != "" {
		return err
	}
	for target, fix := range map[*rpcerr.Error]string{
		blob.ErrNoBucket:    "make the bucket, or fix blob.url and blob.region",
		blob.ErrDenied:      "check the credentials of [blob], or the role of this host",
		blob.ErrUnavailable: "check blob.endpoint and the connection of this host to it; `rollout doctor` shows details",
	} {
		if errors.Is(err, target) {
			return target.WithMessage("%s", name).Wrap(err).Fix(fix)
		}
	}
	return fmt.Errorf("%s: %w", name, err)
}
