"""From a torch module to a graph: only at the founder's."""
