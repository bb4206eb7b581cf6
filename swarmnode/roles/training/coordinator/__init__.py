"""The coordinator of a training: its election, rendezvous, leases, and the steps."""
