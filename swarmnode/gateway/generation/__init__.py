"""What every API has in common: requests become generations, and what these say is read."""
