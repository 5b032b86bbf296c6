"""Servers that outlive the command that started them: start, find, show, stop."""
