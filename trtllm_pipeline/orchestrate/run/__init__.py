"""Runs a plan: a pure scheduler, the loop around it, and executors that run jobs."""
