"""The gateway: a swarm over HTTP, as the tools that people have expect it."""
