"""Sockets that record when bytes arrived, and the protocols on them."""


class ProtocolError(Exception):
    """The peer closed the connection, violated the protocol, or exceeded a limit."""
