"""Access to the gateway: API keys, their limits, and the queue for places."""
