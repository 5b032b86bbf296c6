"""Triton model repositories: config.pbtxt, an engine's config.json, and lint rules for both."""
