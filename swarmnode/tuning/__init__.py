"""Tuning of adapters on the layers that peers serve: `server.py` is a node's side, `client/` the owner's side."""
