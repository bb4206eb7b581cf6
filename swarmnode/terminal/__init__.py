"""Terminal output of commands: tables, curves, progress, durations, log lines."""
