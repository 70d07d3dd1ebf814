package bus

import (
	"errors"
	"net/http"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// What passes by itself is ErrUnavailable: messages with an id are published again then.
func TestErrorsThatPass(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		api  jetstream.APIError
		want error
	}{
		{jetstream.APIError{Code: http.StatusServiceUnavailable, ErrorCode: 10008}, ErrUnavailable},
		{jetstream.APIError{Code: http.StatusConflict, ErrorCode: codeInProcess}, ErrUnavailable},
		{jetstream.APIError{Code: http.StatusBadRequest, ErrorCode: codeNoPeers}, ErrReplicas},
		{jetstream.APIError{Code: http.StatusBadRequest, ErrorCode: codeAccountFull}, ErrFull},
		{jetstream.APIError{Code: http.StatusServiceUnavailable, ErrorCode: codeFull}, ErrFull},
		{jetstream.APIError{Code: http.StatusInternalServerError, ErrorCode: codeStorage}, ErrFull},
		{jetstream.APIError{Code: http.StatusServiceUnavailable, ErrorCode: codeStore, Description: "maximum bytes exceeded"}, ErrFull},
		{jetstream.APIError{Code: http.StatusServiceUnavailable, ErrorCode: codeStore, Description: "store is closed"}, ErrUnavailable},
		{jetstream.APIError{Code: http.StatusServiceUnavailable, ErrorCode: codeStore, Description: "write /n/1.blk: no space left on device"}, rpcerr.ErrDiskFull},
		{jetstream.APIError{Code: http.StatusInternalServerError, ErrorCode: 10049, Description: "mkdir /n: no space left on device"}, rpcerr.ErrDiskFull},
		{jetstream.APIError{Code: http.StatusBadRequest, ErrorCode: codeStreamTooLarge}, ErrLimits},
		{jetstream.APIError{Code: http.StatusBadRequest, ErrorCode: 10060}, nil}, // a wrong last sequence: the same the next time
	} {
		err := mapError(&c.api)
		if c.want != nil && !errors.Is(err, c.want) || c.want == nil && errors.Is(err, ErrUnavailable) {
			t.Errorf("%d/%d is %v, want %v", c.api.Code, c.api.ErrorCode, err, c.want)
		}
	}
}
