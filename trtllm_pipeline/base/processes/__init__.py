"""Processes: a guardian that ends them all, groups, and why one was killed."""
