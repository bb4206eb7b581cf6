"""Wishes of a machine's owner for the node on it: to lend, to pause or to finish, by command or by rule."""
