"""Names of the models in a Triton repository of TensorRT-LLM."""

from typing import Final

ENSEMBLE: Final = "ensemble"
BLS_MODEL: Final = "tensorrt_llm_bls"
ENGINE_MODEL: Final = "tensorrt_llm"
DRAFT_MODEL: Final = "tensorrt_llm_draft"
"""The draft model of ENGINE_MODEL. BLS_MODEL serves both together."""
ENCODERS_MODEL: Final = "multimodal_encoders"
"""Runs the vision encoder engine on rank 0. Every rank loads it."""
