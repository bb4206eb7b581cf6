"""What comes out of a simulation: measures, a summary, a page to read."""
