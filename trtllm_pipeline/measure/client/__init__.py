"""Talking to servers."""
