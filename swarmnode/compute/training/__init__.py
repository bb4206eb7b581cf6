"""Training on this machine: forward and backward passes of the held layers, gradients by microbatch, the optimiser's update."""
