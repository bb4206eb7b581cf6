"""Simulated serving: sessions, followed token by token or as a whole."""
