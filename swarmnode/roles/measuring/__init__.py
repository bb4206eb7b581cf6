"""What peers measure of one another while they work, and say of themselves."""
