"""The long-running peers: a volunteer's node, the bootstrap peer, and a host's machine that is both."""
