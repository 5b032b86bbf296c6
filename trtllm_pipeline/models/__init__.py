"""Fetches, reads and checks models; Triton model repositories and engine configurations."""

from trtllm_pipeline.doors import door

__getattr__, __all__ = door(__name__)
