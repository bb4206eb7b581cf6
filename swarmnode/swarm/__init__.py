"""What a swarm is and who is in it: manifest, invite, signed announcements, the live directory. No torch."""
