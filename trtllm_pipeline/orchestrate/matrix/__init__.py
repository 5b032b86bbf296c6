"""Reads matrix files and recipes (`document`), checks them (`validate`, with `models`) and expands them to cells (`expand`)."""
