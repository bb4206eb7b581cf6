"""Who may ask, how often, and whose turn it is."""
