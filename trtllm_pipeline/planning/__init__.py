"""From cells to a plan: which stage runs there are, what they share, why each runs, and how long it takes."""
