"""Turns a verified cell into an endpoint or a bundle: managed servers, the gateway, exports."""

from trtllm_pipeline.doors import door

__getattr__, __all__ = door(__name__)
