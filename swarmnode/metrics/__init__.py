"""Metrics of a process for Prometheus. Lower rooms keep plain counts, which are read at each scrape."""
