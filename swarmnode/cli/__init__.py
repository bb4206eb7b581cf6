"""Command line: one module per command, or per group of related commands."""
