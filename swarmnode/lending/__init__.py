"""What the owner of a machine wants of the node on it: to lend, to pause, to finish; by command or by rule."""
