"""The page: what a browser shows of swarms and of this machine, and the endpoints that feed it."""
