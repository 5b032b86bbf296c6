"""Triton's protobuf messages from tritonclient, without its clients, which import grpc, numpy and ml_dtypes: 0.1 s.

The enclosing package is hidden while they are imported. Later imports get the whole package, with these messages.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec, module_from_spec

_PACKAGE = "tritonclient.grpc"
_spec = None if _PACKAGE in sys.modules else find_spec(_PACKAGE)
if _spec is not None:
    sys.modules[_PACKAGE] = module_from_spec(_spec)
try:
    from tritonclient.grpc import model_config_pb2, service_pb2
finally:
    if _spec is not None:
        del sys.modules[_PACKAGE]

__all__ = ["model_config_pb2", "service_pb2"]
