"""Credit: who was served signs for it, and who did the work keeps what was signed."""
