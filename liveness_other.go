//go:build !linux

package deadconn

import "syscall"

// tcpInfo knows nothing here: the verdict waits for stronger evidence.
func tcpInfo(syscall.RawConn) kernelInfo { return kernelInfo{} }

// probePeer cannot make this kernel probe.
func probePeer(syscall.RawConn) keepAlive { return keepAlive{} }

func unprobe(syscall.RawConn, keepAlive) {}
