"""Audits: sessions computed once more by others, and what is told of who was false."""
