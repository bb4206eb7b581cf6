"""The real network: hivemind's p2pd, its process, its sockets, and the table's calls over it."""
