"""How commands look on a terminal: tables, curves, progress, durations, log lines."""
