"""Simulated serving: sessions, token by token or as a whole."""
