// Package s3 stores blobs in a bucket of S3 or a compatible server. The server must support
// conditional writes and CRC-32C: AWS, MinIO, Ceph, Cloudflare R2, versitygw.
//
// A blob is created with If-None-Match, so one of several concurrent writers succeeds. Each blob
// has a mark of its writer, by which a writer that lost the answer to a successful request
// recognizes its own blob. An upload in parts whose process dies leaves parts that are invisible
// but cost money: give the bucket a lifecycle rule that aborts incomplete multipart uploads after a
// day.
package s3

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/aws/ratelimit"
	"github.com/aws/aws-sdk-go-v2/aws/retry"
	awshttp "github.com/aws/aws-sdk-go-v2/aws/transport/http"
	"github.com/aws/aws-sdk-go-v2/config"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/smithy-go"

	"github.com/rollout-rl/rollout/libs/blob"
)

// Config has the place of the bucket and the access to it.
type Config struct {
	Bucket   string
	Prefix   string // of every key, without slashes at its ends; "" is the whole bucket
	Region   string // "" is us-east-1
	Endpoint string // URL of a server that is not AWS; its buckets are addressed by path
	// AccessKey and SecretKey; both "" takes what AWS's own chain finds: environment, profile, web
	// identity, instance role.
	AccessKey, SecretKey string
	Access               string // where the keys come from, for people

	PartBytes int64         // larger blobs are uploaded in parts of this size, at least 5 MiB; 0: 16 MiB
	Idle      time.Duration // a connection that transfers nothing for so long is given up; 0: 30 s
}

const (
	defaultPart = 16 << 20
	maxParts    = 10_000
	defaultIdle = 30 * time.Second
	maxAttempts = 8 // of one request, within about 20 s
	maxBackoff  = 5 * time.Second
)

// Store is a blob.Store.
type Store struct {
	c   Config
	api *s3.Client
}

// Open makes a store; no request is sent but those that find credentials.
func Open(ctx context.Context, c Config) (*Store, error) {
	if c.Region == "" {
		c.Region = "us-east-1"
	}
	if c.PartBytes == 0 {
		c.PartBytes = defaultPart
	}
	if c.Idle == 0 {
		c.Idle = defaultIdle
	}
	c.Prefix = strings.Trim(c.Prefix, "/")
	provider, err := c.credentials(ctx)
	if err != nil {
		return nil, err
	}
	client := awshttp.NewBuildableClient().WithTransportOptions(func(t *http.Transport) {
		t.ResponseHeaderTimeout, t.MaxIdleConnsPerHost = c.Idle, 64
	})
	api := s3.New(s3.Options{
		Region: c.Region, Credentials: provider, HTTPClient: client, UsePathStyle: c.Endpoint != "",
		Retryer: retry.NewStandard(func(o *retry.StandardOptions) {
			o.MaxAttempts, o.MaxBackoff = maxAttempts, maxBackoff
			o.RateLimiter = ratelimit.None // attempts are bounded; a shared quota would punish the calls after an outage
			o.Retryables = append([]retry.IsErrorRetryable{retry.RetryableErrorCode{Codes: map[string]struct{}{conflict: {}}}}, o.Retryables...)
		}),
		RequestChecksumCalculation: aws.RequestChecksumCalculationWhenRequired, // this package sends its own checksums
		ResponseChecksumValidation: aws.ResponseChecksumValidationWhenRequired, // and verifies what it reads
	}, func(o *s3.Options) {
		if c.Endpoint != "" {
			o.BaseEndpoint = aws.String(c.Endpoint)
		}
	})
	return &Store{c: c, api: api}, nil
}

// credentials returns blob.ErrDenied if none are found.
func (c Config) credentials(ctx context.Context) (aws.CredentialsProvider, error) {
	if c.AccessKey != "" {
		return credentials.NewStaticCredentialsProvider(c.AccessKey, c.SecretKey, ""), nil
	}
	loaded, err := config.LoadDefaultConfig(ctx, config.WithRegion(c.Region))
	if err != nil {
		return nil, fmt.Errorf("load the configuration of AWS: %w", err)
	}
	return aws.NewCredentialsCache(aws.CredentialsProviderFunc(func(ctx context.Context) (aws.Credentials, error) {
		found, err := loaded.Credentials.Retrieve(ctx)
		if err != nil && ctx.Err() == nil {
			err = blob.ErrDenied.Wrap(err)
		}
		return found, err
	})), nil
}

func (s *Store) object(key string) *string {
	if s.c.Prefix != "" {
		key = s.c.Prefix + "/" + key
	}
	return &key
}

// Codes of S3's answers.
const (
	conflict     = "ConditionalRequestConflict" // another conditional write of the key is in progress
	precondition = "PreconditionFailed"
	noUpload     = "NoSuchUpload"
)

// denied are the codes of refused credentials. Some gateways answer with a 404, which does not mean
// a missing object.
var denied = []string{"AccessDenied", "InvalidAccessKeyId", "XAdminUserNotFound", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken"}

func code(err error) string {
	var api smithy.APIError
	if errors.As(err, &api) {
		return api.ErrorCode()
	}
	return ""
}

func status(err error) int {
	var response *awshttp.ResponseError
	if errors.As(err, &response) {
		return response.HTTPStatusCode()
	}
	return 0
}

// answer is the status and the code of a response, for people.
func answer(err error) string {
	var api smithy.APIError
	text := fmt.Sprintf("HTTP %d", status(err))
	if errors.As(err, &api) {
		text += fmt.Sprintf(", %s: %s", api.ErrorCode(), strings.TrimSuffix(api.ErrorMessage(), "."))
	}
	return strings.TrimSuffix(text, ": ")
}

func (s *Store) place() blob.Place {
	return blob.Place{Endpoint: s.c.Endpoint, Bucket: s.c.Bucket, Access: s.c.Access}
}

// mapError turns the client's errors into the port's; context errors stay.
func (s *Store) mapError(op, key string, err error) error {
	var network net.Error
	switch {
	case err == nil, errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded), errors.Is(err, blob.ErrDenied):
	case code(err) == "NoSuchBucket":
		err = blob.ErrNoBucket.With("bucket", s.c.Bucket).Wrap(err)
	case slices.Contains(denied, code(err)):
		return s.place().Denied(op, key, answer(err))
	case code(err) == "NoSuchKey", status(err) == http.StatusNotFound:
		err = blob.ErrNotFound
	case code(err) == precondition, status(err) == http.StatusPreconditionFailed:
		err = blob.ErrExists
	case status(err) == http.StatusRequestedRangeNotSatisfiable:
		err = blob.ErrBadRange.With("key", key)
	case status(err) == http.StatusForbidden, status(err) == http.StatusUnauthorized:
		return s.place().Denied(op, key, answer(err))
	case status(err) == http.StatusMovedPermanently:
		err = blob.ErrNoBucket.With("bucket", s.c.Bucket).With("region", s.c.Region).Wrap(err)
	case status(err) >= http.StatusInternalServerError, status(err) == http.StatusTooManyRequests, code(err) == conflict,
		errors.As(err, &network), status(err) == 0:
		return s.place().Silent(op, key, err)
	}
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s blob %s: %w", op, key, err)
}
