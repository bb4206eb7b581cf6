"""Where peers are reached: multiaddrs, the local network, NAT."""
