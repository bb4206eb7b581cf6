"""Cost of computing a graph or a span, before anything is computed."""
