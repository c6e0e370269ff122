//go:build !linux

package netlab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os/exec"
)

var errUnsupported = fmt.Errorf("netlab: network namespaces need Linux: %w", errors.ErrUnsupported)

// Lab cannot be made on this system.
type Lab struct{}

// New fails with errors.ErrUnsupported.
func New() (*Lab, error) { return nil, errUnsupported }

// NewWith fails with errors.ErrUnsupported.
func NewWith(Options) (*Lab, error) { return nil, errUnsupported }

func (*Lab) Close() error                                           { return errUnsupported }
func (*Lab) Listen(int) (net.Listener, error)                       { return nil, errUnsupported }
func (*Lab) Dial(context.Context, string, string) (net.Conn, error) { return nil, errUnsupported }
func (*Lab) StartServer(*exec.Cmd) error                            { return errUnsupported }
func (*Lab) ServerAddr() string                                     { return serverIP }
func (*Lab) Cut(net.Conn) error                                     { return errUnsupported }
func (*Lab) CutOneWay(net.Conn, bool) error                         { return errUnsupported }
func (*Lab) CutPath() error                                         { return errUnsupported }
func (*Lab) HealPath() error                                        { return errUnsupported }
func (*Lab) Heal() error                                            { return errUnsupported }
func (*Lab) RejectRST(net.Conn) error                               { return errUnsupported }
func (*Lab) LinkDown() error                                        { return errUnsupported }
func (*Lab) LinkUp() error                                          { return errUnsupported }
func (*Lab) Stats() (delivered, dropped int64)                      { return 0, 0 }
