"""Planning before anybody lends a machine: a model laid on a network of devices that are known."""
