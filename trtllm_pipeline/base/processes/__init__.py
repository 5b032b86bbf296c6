"""Processes: a guardian that ends all of them, process groups, and why a process was killed."""
