"""What links show of the paths to peers: round trips, throughput, traffic, network coordinates."""
