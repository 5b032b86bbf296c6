"""The command line: a module a command group; each parses, calls one function, shows the result."""
