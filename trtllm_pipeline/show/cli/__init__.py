"""The command line, with one module per command group. Each parses options, calls one function and shows the result."""

import gc

# Imports and large plans create many objects but no garbage. With the default thresholds, collection takes a fifth of
# the time.
gc.set_threshold(100_000, 50, 100)
