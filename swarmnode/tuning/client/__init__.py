"""Side of the owner of an adapter: conversations with the hops of a route, steps, and recovery."""
