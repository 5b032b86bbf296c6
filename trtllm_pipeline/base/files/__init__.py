"""Reading and writing files that others made or will read."""
