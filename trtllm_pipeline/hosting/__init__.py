"""Servers that stay up: started, found again, watched and stopped by `pipeline serve`."""
