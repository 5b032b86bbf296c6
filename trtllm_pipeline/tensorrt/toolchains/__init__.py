"""Toolchains: the software that turns weights into something served. One package each behind one small record."""
