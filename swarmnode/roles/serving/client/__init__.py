"""The client's side of serving: sessions, generation, and whom to leave out when something fails."""
