"""Tuning of adapters on the layers that peers serve: `server.py` is a node's side, `client/` the side of the owner of an adapter and its data."""
