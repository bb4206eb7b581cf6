"""Training states on disk: written, given to replicas, fetched from them, exported."""
