"""Training on this machine: forward and backward passes of the held units, gradients by microbatch, the optimiser's update."""
