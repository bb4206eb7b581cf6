"""The real network: hivemind's p2pd, its child process, its sockets, and the table's calls."""
