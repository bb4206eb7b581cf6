"""HTTP layer of the gateway: the server, errors with a status, and responses that are streams of events."""
