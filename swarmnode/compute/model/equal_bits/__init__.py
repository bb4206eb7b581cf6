"""Plain products with equal bits in any company."""
