"""Builds and serves models: stages, toolchains, servers, and the diagnosis of failures."""

from trtllm_pipeline.doors import door

__getattr__, __all__ = door(__name__)
