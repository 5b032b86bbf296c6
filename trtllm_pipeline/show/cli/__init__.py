"""The command line: a module a command group; each parses, calls one function, shows the result."""

import gc

# Imports and large plans create many objects and no garbage. With the default thresholds, collection takes a fifth of the time.
gc.set_threshold(100_000, 50, 100)
