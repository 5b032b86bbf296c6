"""A verified cell in, an endpoint or a bundle out: managed servers, the gateway, exports."""

from trtllm_pipeline.doors import door

__getattr__, __all__ = door(__name__)
