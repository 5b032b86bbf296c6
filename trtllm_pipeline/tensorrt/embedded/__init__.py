"""The embedded toolchain. Nothing is imported here: programs of its stages are started without the table of them."""
