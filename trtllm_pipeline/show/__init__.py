"""User interfaces: the command line, reports, comparisons, progress, search, doctor."""

from trtllm_pipeline.doors import door

__getattr__, __all__ = door(__name__)
