"""From cells to a plan: which stage runs there are, what they share, and why each has to run."""
