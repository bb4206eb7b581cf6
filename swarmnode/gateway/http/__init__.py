"""Over HTTP itself: the server, errors with a status, and answers that come as events."""
