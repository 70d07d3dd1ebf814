//go:build !linux

package disktest

import "errors"

func mount(_, _ string) (unmount func() error, err error) { return nil, errors.ErrUnsupported }
