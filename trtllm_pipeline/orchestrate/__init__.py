"""Turns cells into artifacts and results: the matrix, the plan, the run, clusters, the store."""

from trtllm_pipeline.doors import door

__getattr__, __all__ = door(__name__)
