"""Serving: a session as its client and as each of its hops sees it."""
