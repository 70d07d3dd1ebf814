package backend

import (
	"context"
	"errors"
	"fmt"

	"github.com/rollout-rl/rollout/libs/blob"
	"github.com/rollout-rl/rollout/libs/blob/gcs"
	"github.com/rollout-rl/rollout/libs/blob/s3"
	"github.com/rollout-rl/rollout/libs/config"
	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// Bucket is the configured bucket; nil where blobs are files. It is asked for a blob that is not there, so that a bucket that
// is missing or refuses us is known now.
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
		})
	case "gs":
		var credentials string
		if credentials, err = c.Credentials.Read("blob.credentials", environ); err != nil {
			return nil, err
		}
		store, err = gcs.Open(ctx, gcs.Config{
			Bucket: bucket.Name, Prefix: bucket.Prefix, Endpoint: c.Endpoint, Credentials: credentials,
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

// explained gives an error of a bucket its name and its fix.
func explained(name string, err error) error {
	for target, fix := range map[*rpcerr.Error]string{
		blob.ErrNoBucket:    "make the bucket, or fix blob.url and blob.region",
		blob.ErrDenied:      "check the credentials of [blob], or the role of this host",
		blob.ErrUnavailable: "check blob.endpoint, and that this host reaches it; `rollout doctor` says why",
	} {
		if errors.Is(err, target) {
			return target.WithMessage("%s", name).Wrap(err).Fix(fix)
		}
	}
	return fmt.Errorf("%s: %w", name, err)
}
