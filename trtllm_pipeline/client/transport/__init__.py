"""Sockets that note when bytes came, and the protocols on them."""
