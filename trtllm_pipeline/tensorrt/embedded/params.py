"""Parameters of the stages of the embedded toolchain. Types of fields are read: no `annotations` from the future."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from trtllm_pipeline.tensorrt.stage.params import Parameters, param
from trtllm_pipeline.tensorrt.stage.repository_settings import TextModels

ARCHITECTURES: Final[Mapping[str, str]] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Class name in `config.json` -> name of the architecture in a GGUF file."""
PRECISIONS: Final = ("fp32", "fp16", "bf16", "int8_wo", "int4_wo")
CONTEXT_STEP: Final = 256
"""llama.cpp rounds the context of a slot up to a multiple of this."""
CHUNK_TOKENS: Final = 64
"""Maximum tokens computed in one step, which limits the delay that a long prompt causes. With a prompt of 900 tokens, other
requests waited 0.26 s per token with 64 and 0.48 s with 128 (SmolLM2-135M, 2 cores), and its own first token was not later."""


@dataclass(frozen=True, kw_only=True)
class ConvertEmbedded(Parameters):
    """Parameters of the convert stage."""

    precision: str = param("precision of the weights", choices=PRECISIONS)


@dataclass(frozen=True, kw_only=True)
class BuildEmbedded(Parameters):
    """Parameters of the build stage."""

    max_batch_size: int = param("requests in flight", ge=1)
    max_input_len: int = param("tokens of a prompt", ge=1)
    max_seq_len: int = param("tokens of prompt and output together", ge=1)
    max_num_tokens: int | None = param("tokens of one forward pass over all requests", None, ge=1, null="8192")


@dataclass(frozen=True, kw_only=True)
class RepositoryEmbedded(TextModels):
    """Parameters of the repository stage."""

    max_batch_size: int = param("requests that Triton accepts at once", ge=1)
