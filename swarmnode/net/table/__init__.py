"""The distributed table: Kademlia, for records that anybody may store and nobody should be able to keep from others."""
