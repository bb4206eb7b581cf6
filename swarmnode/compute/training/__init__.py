"""Training on this machine: forward and backward of the units held, gradients by microbatch, the optimiser's update."""
