"""Clients for inference servers."""
