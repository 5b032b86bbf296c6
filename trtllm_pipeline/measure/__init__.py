"""Measuring any server: clients, prompts, load, scores. It knows no matrix."""

from trtllm_pipeline.doors import door

__getattr__, __all__ = door(__name__)
