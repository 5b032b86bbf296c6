"""Shared by all houses: errors, domain types, fingerprints, the terminal, files, this machine, processes."""

from trtllm_pipeline.doors import door

__getattr__, __all__ = door(__name__)
