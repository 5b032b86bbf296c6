"""The command line: a module a command group; each parses, calls one function, shows the result."""

import gc

# Imports, and large plans, are many objects and no garbage: looking for it by the usual thresholds takes a fifth of the time.
gc.set_threshold(100_000, 50, 100)
