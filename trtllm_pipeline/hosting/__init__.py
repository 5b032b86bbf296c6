"""Servers that outlive the command that started them: started, found again, shown, stopped."""

from trtllm_pipeline.hosting.servers import Endpoint, KeptServer, State, find

__all__ = ["Endpoint", "KeptServer", "State", "find"]
