"""Addresses of peers: multiaddrs, the local network, NAT."""
