"""Routing: which peers a session goes through."""
