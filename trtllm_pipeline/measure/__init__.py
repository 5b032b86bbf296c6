"""Measures any server: clients, prompts, load, scores. It does not depend on matrices."""

from trtllm_pipeline.doors import door

__getattr__, __all__ = door(__name__)
