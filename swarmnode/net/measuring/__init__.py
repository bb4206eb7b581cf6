"""Measurements of the paths to peers from their links: round trips, throughput, traffic, network coordinates."""
