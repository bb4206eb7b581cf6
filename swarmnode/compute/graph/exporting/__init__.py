"""Export of a torch module to a graph. Runs only on the founder's machine."""
