"""Swarm and peers as data: manifest, invite, signed announcements, the live directory. No torch."""
