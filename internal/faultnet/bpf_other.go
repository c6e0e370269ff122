//go:build !linux

package faultnet

import (
	"errors"
	"net"
)

// BlackholeSocket is available on Linux only.
func BlackholeSocket(c net.Conn) error { return errors.ErrUnsupported }

// HealSocket is available on Linux only.
func HealSocket(c net.Conn) error { return errors.ErrUnsupported }
