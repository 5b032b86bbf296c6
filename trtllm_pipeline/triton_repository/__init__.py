"""Triton model repositories: config.pbtxt, what an engine says of itself, and rules for both."""
