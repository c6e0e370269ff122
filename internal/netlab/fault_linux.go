package netlab

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
)

// ruleset is the nft table of one side. The sets hold flows, each as the
// client's port and the server's port; client and server name the fields of an
// arriving packet that carry those.
//
// All packets are judged where they arrive, never where they are sent: a drop
// in the sender's own stack is reported to its TCP, which then does not count
// the segment as sent. TCP_INFO would show no unacknowledged segments and no
// retransmissions, unlike on any real black hole.
//
// A RST is let through the reset rules, or the one that the other side's rule
// sends would be stopped by this side's.
//
// The names have underscores because nft, which has no quotes, takes plain
// words such as "reset" for its own.
func ruleset(client, server string) string {
	flow := "tcp " + client + " . tcp " + server
	return `
table ip netlab {
	set cut_flows { type inet_service . inet_service; }
	set reset_flows { type inet_service . inet_service; }
	chain cut_path {}
	chain arrive {
		type filter hook prerouting priority raw; policy accept;
		jump cut_path
		` + flow + ` @cut_flows drop
	}
	chain local_in {
		type filter hook input priority filter; policy accept;
		tcp flags & rst == 0 ` + flow + ` @reset_flows reject with tcp reset
	}
}
`
}

// Cut drops everything of c's flow, both ways, without a word to either end.
// Other connections, new ones too, are not touched. c is either end, possibly
// wrapped.
func (l *Lab) Cut(c net.Conn) error {
	return l.mark(c, "cut_flows", true, true)
}

// CutOneWay drops what c's flow sends to the server, or to the client.
func (l *Lab) CutOneWay(c net.Conn, toServer bool) error {
	return l.mark(c, "cut_flows", toServer, !toServer)
}

// RejectRST answers every packet of c's flow with a RST to its sender, as a
// firewall does that has lost the connection. Nothing happens before a packet
// is sent.
func (l *Lab) RejectRST(c net.Conn) error {
	return l.mark(c, "reset_flows", true, true)
}

// mark puts c's flow into a set of the side where the packets arrive.
func (l *Lab) mark(c net.Conn, set string, toServer, toClient bool) error {
	client, server, err := flowOf(c)
	if err != nil {
		return err
	}
	script := fmt.Sprintf("add element ip netlab %s { %d . %d }\n", set, client, server)
	return l.rules(script, toServer, toClient)
}

// CutPath drops everything, both ways.
func (l *Lab) CutPath() error {
	return l.rules("flush chain ip netlab cut_path\nadd rule ip netlab cut_path iifname != \"lo\" drop\n", true, true)
}

// HealPath undoes CutPath.
func (l *Lab) HealPath() error {
	return l.rules("flush chain ip netlab cut_path\n", true, true)
}

// Heal undoes all cuts and rejections, that of the path included.
func (l *Lab) Heal() error {
	return l.rules("flush set ip netlab cut_flows\nflush set ip netlab reset_flows\nflush chain ip netlab cut_path\n", true, true)
}

func (l *Lab) rules(script string, atServer, atClient bool) error {
	return l.change(func() error {
		if atServer {
			if err := l.server.nft(script); err != nil {
				return err
			}
		}
		if atClient {
			return l.client.nft(script)
		}
		return nil
	})
}

// flowOf finds the ports of the flow that c is an end of.
func flowOf(c net.Conn) (client, server uint16, err error) {
	for {
		w, ok := c.(interface{ NetConn() net.Conn }) // *tls.Conn and its like
		if !ok {
			break
		}
		c = w.NetConn()
	}
	if c == nil {
		return 0, 0, errors.New("netlab: no connection to cut")
	}
	local, err := netip.ParseAddrPort(c.LocalAddr().String())
	if err != nil {
		return 0, 0, fmt.Errorf("netlab: local address: %w", err)
	}
	remote, err := netip.ParseAddrPort(c.RemoteAddr().String())
	if err != nil {
		return 0, 0, fmt.Errorf("netlab: remote address: %w", err)
	}
	switch clientIP {
	case local.Addr().String():
		return local.Port(), remote.Port(), nil
	case remote.Addr().String():
		return remote.Port(), local.Port(), nil
	}
	return 0, 0, fmt.Errorf("netlab: %v to %v is not a connection of the lab", local, remote)
}
