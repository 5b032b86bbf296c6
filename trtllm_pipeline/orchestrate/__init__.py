"""Cells in, artifacts and results out: the matrix, the plan, the run, clusters, the store."""

from trtllm_pipeline.doors import door

__getattr__, __all__ = door(__name__)
