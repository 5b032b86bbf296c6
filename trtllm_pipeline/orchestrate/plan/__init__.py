"""Plans cells: their stage runs, which runs they share, and why each must run."""
