"""Conversations with peers: frames over a stream, channels over a link, and the edge from one hop to the next."""
