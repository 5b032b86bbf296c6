"""Reads and writes files shared with users and other programs."""
