"""Planning before any machine is lent: the placement of a model on a network of known devices."""
