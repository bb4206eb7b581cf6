"""The distributed table: Kademlia, for records that any peer may store and no peer should be able to withhold from others."""
