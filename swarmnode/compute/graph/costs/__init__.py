"""What computing a graph or a span costs, before anything is computed."""
