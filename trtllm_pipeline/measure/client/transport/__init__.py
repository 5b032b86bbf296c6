"""Sockets that note when bytes came, and the protocols on them."""


class ProtocolError(Exception):
    """The peer closed the connection, violated the protocol, or exceeded a limit."""
