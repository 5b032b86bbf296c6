"""Toolchains: the software that turns weights into a server. One package each, described by one small record."""
