"""Results of a simulation: measures, a summary, and a report page."""
