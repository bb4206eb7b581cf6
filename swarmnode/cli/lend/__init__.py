"""Commands of who lends this machine."""
