"""Python imports this when it starts, in processes that tests start: see `patience`."""

import os

if "PYTEST_CURRENT_TEST" in os.environ:
    import patience

    patience.install()
