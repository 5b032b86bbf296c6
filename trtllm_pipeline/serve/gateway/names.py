"""Metric names of the gateway that readers of its metrics also need; requires no gateway packages."""

from typing import Final

PREFIX: Final = "pipeline_gateway"
"""Prefix of every metric."""
UNKNOWN: Final = "unknown"
"""Label for a model that is not served: clients choose names, and must not create series."""
