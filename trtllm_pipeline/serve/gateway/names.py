"""Names in the gateway's metrics that their readers know, too; without the packages of the gateway."""

from typing import Final

PREFIX: Final = "pipeline_gateway"
"""Prefix of every metric."""
UNKNOWN: Final = "unknown"
"""Label of a model that is not served: clients choose names, and must not make series of them."""
