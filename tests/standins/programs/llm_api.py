"""What the LLM API of a release says of a model and of `speculative_config`, for servers that read them. PyTorch only.

Names by release: `tests/data/tensorrt_llm/llm_args.json`, which says how it was read. The words of refusals are those that were read
in llm_args.py, or begin with stand-in.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from tests.standins.programs import ProgramError, refusal
from tests.standins.refusals import holds

_RECORDED: Final = Path(__file__).resolve().parents[2] / "data" / "tensorrt_llm" / "llm_args.json"
_MAPPINGS: Final = ("kv_cache_config", "lora_config", "cache_transceiver_config")

_MTP: Final = ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm_moe_dsa", "exaone_moe", "nemotron_h", "qwen3_next")
"""`model_type` in MTPForCausalLM of modeling_speculative.py; later trees have more."""
_NOT_PYTORCH: Final = ("Medusa", "Lookahead")
_WITHOUT_CLASS: Final = (
    *("GemmaForCausalLM", "Gemma2ForCausalLM", "PhiForCausalLM", "GPT2LMHeadModel", "InternLM2ForCausalLM"),
    *("ChatGLMModel", "ChatGLMForConditionalGeneration", "QWenLMHeadModel"),
)
"""Architectures that no module of tensorrt_llm/_torch/models registers, 1.0 to 1.2."""
_ALGORITHMS: Final = ("FP8", "FP8_BLOCK_SCALES", "NVFP4", "W4A16_AWQ", "W4A8_AWQ", "W4A8_MXFP4_FP8", "W4A16_MXFP4")
"""Those that `get_quant_method` in tensorrt_llm/_torch/modules/linear.py knows."""


def check_architecture(config: Mapping[str, Any]) -> None:
    """Raise ProgramError for a model that the runtime has no class for. Source: modeling_auto.py."""
    for name in config.get("architectures") or ():
        if name in _WITHOUT_CLASS:
            raise ProgramError(f"ValueError: Unknown architecture for AutoModelForCausalLM: {name}")


def check_algorithm(quantization: Mapping[str, Any]) -> None:
    """Raise ProgramError for weights in a form that the runtime has no linear layer for. Source: linear.py."""
    algorithm = quantization.get("quant_algo")
    if algorithm not in {None, *_ALGORITHMS}:
        raise ProgramError(f"ValueError: unsupported quant mode: {algorithm}")


@lru_cache(maxsize=1)
def recorded() -> dict[str, Any]:
    """Names by the mapping that has them."""
    found: dict[str, Any] = json.loads(_RECORDED.read_text(encoding="utf-8"))
    return found


@lru_cache(maxsize=64)
def of(release: str) -> dict[str, Any]:
    """The names of a release: by mapping, and by decoding type with those that must be greater than 0. Puts releases in order, which
    programs cannot: they find it among their facts.
    """

    def names(rows: Mapping[str, Any]) -> list[str]:
        return [name for name, row in rows.items() if holds(row, release)]

    found: dict[str, Any] = {name: names(recorded()[name]) for name in ("arguments", *_MAPPINGS, "speculative_config")}
    types = {kind: row for kind, row in recorded()["decoding_types"].items() if holds(row, release)}
    return found | {
        "decoding_types": {
            kind: {"names": names(row["names"]), "required": names(row.get("required", {}))}
            for kind, row in types.items()
        }
    }


def check_names(asked: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raise ProgramError for a name that is not `known` of the release, in any mapping but speculative_config."""
    _only(asked, known["arguments"])
    for name in _MAPPINGS:
        _only(asked.get(name) or {}, known[name])


def _only(asked: Mapping[str, Any], known: Collection[str]) -> None:
    if unknown := sorted(asked.keys() - {*known}):
        raise ProgramError(f"pydantic_core.ValidationError: {unknown[0]}\n  Extra inputs are not permitted")


def check_speculation(asked: Mapping[str, Any], model: Mapping[str, Any], known: Mapping[str, Any]) -> int:
    """Tokens drafted at a time. Raises ProgramError for what a release refuses of which these names are known."""
    kind = str(asked.get("decoding_type"))
    own = known["decoding_types"].get(kind)
    if own is None:
        raise ProgramError(f"ValueError: Invalid decoding type: {kind}")
    _only(asked, [*known["speculative_config"], *own["names"]])
    for name in own["required"]:
        if not asked.get(name, 0) > 0:
            raise ProgramError(f"AssertionError: {name} is not greater than 0")
    if kind in _NOT_PYTORCH:
        raise refusal(f"{kind} is not for the PyTorch backend")
    length = asked.get("max_draft_len", asked.get("num_nextn_predict_layers"))
    if not isinstance(length, int) or length < 1:
        raise ProgramError(f"ValueError: max_draft_len must be > 0 for {kind}")
    drafter = asked.get("speculative_model_dir")
    if kind == "Eagle" and drafter is None:
        raise ProgramError("ValueError: Draft model must be provided for EAGLE")
    if kind in {"DraftTarget", "Draft_Target"} and drafter is None:
        raise ProgramError("ValueError: speculative_model must be specified for DraftTarget")
    if kind in {"PARD", "DFlash"} and drafter is None:
        raise refusal(f"{kind} needs a draft model")
    if drafter is not None and not (Path(drafter) / "config.json").is_file():
        raise ProgramError(f"OSError: {drafter} does not appear to have a file named config.json.")
    if kind == "MTP" and not model.get("num_nextn_predict_layers"):
        raise refusal("the model has no layers for MTP")
    if kind == "MTP" and model.get("model_type") not in {None, *_MTP}:
        raise ProgramError(f"ValueError: Model type {model['model_type']} not supported for MTP")
    return length


def check_lookahead(asked: Mapping[str, Any], build: Mapping[str, Any]) -> None:
    """Raise ProgramError for what cannot be drafted with an engine, by its `build_config`. Source: llm_args.py of 1.1."""
    if asked.get("decoding_type") != "Lookahead" or asked.keys() - {"decoding_type"} != {
        *recorded()["decoding_types"]["Lookahead"]["names"]
    }:
        raise refusal(f"{asked} is not for engines")
    window, ngram, verified = (asked[f"max_{name}_size"] for name in ("window", "ngram", "verification_set"))
    drafted = (0 if ngram == 1 else ngram - 2) + (window - 1 + verified) * (ngram - 1)
    if build.get("speculative_decoding_mode") != 8 or build.get("max_draft_len") != drafted:
        raise refusal(f"the engine was built for {build.get('max_draft_len')} drafted tokens, asked for are {drafted}")


_MODULES: Final = ("attn_q", "attn_k", "attn_v", "attn_dense", "mlp_h_to_4h", "mlp_4h_to_h", "mlp_gate")


def check_lora(asked: Mapping[str, Any]) -> None:
    """Raise ProgramError for a `lora_config` that cannot be loaded. Lists are told as texts of JSON, see `read_settings`."""
    modules = asked.get("lora_target_modules") or []
    if not modules or set(modules) - {*_MODULES}:
        raise refusal(f"lora_target_modules are {modules}")
    for folder in asked.get("lora_dir") or []:
        file = Path(folder) / "adapter_config.json"
        if not file.is_file():
            raise ProgramError(f"OSError: {folder} does not appear to have a file named adapter_config.json.")
        rank = json.loads(file.read_text(encoding="utf-8"))["r"]
        if rank > asked.get("max_lora_rank", 64):
            raise refusal(f"rank {rank} is above max_lora_rank {asked.get('max_lora_rank', 64)}")


def check_lora_request(asked: Any, settings: Mapping[str, Any]) -> None:
    """Raise ValueError for a request's `lora_request` that the server cannot serve."""
    if asked is None:
        return
    if "lora_config" not in settings:
        raise ValueError("LoRA is not enabled")
    if (
        not {"lora_name", "lora_int_id"} <= asked.keys()
        or not (Path(asked.get("lora_path", "")) / "adapter_config.json").is_file()
    ):
        raise ValueError(f"lora_request is {asked}")


def read_settings(text: str) -> dict[str, Any]:
    """A YAML file of nested mappings with plain values and lists of them, as the pipeline writes it."""
    root: dict[str, Any] = {}
    open_at: list[tuple[int, dict[str, Any]]] = [(-1, root)]
    last: tuple[dict[str, Any], str] = root, ""
    for line in text.splitlines():
        if line.strip().startswith("- "):
            holder, key = last
            holder[key] = [*(holder[key] or ()), _value(line.strip()[2:])]
            continue
        key, colon, value = line.strip().partition(":")
        if not colon:
            continue
        depth = len(line) - len(line.lstrip())
        while open_at[-1][0] >= depth:
            open_at.pop()
        if value.strip():
            open_at[-1][1][key] = _value(value.strip())
        else:
            inner: dict[str, Any] = {}
            open_at[-1][1][key] = inner
            last = open_at[-1][1], key
            open_at.append((depth, inner))
    return root


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text.strip("'\"")


def given_answers(model: Mapping[str, Any]) -> dict[str, str]:
    """What a server of the model with this config.json is to answer to certain prompts, by TRTLLM_STANDIN_ANSWERS."""
    path = os.environ.get("TRTLLM_STANDIN_ANSWERS")
    answers: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    return dict(answers.get(model.get("model_type", ""), answers))


class Iterations:
    """Statistics of iterations as `/metrics` tells them, each once. All but the last token of a draft are accepted."""

    def __init__(self, drafted: int) -> None:
        self.drafted = drafted
        self.told: list[dict[str, Any]] = []

    def answer(self, tokens: int) -> None:
        """Count an answer of so many tokens."""
        while tokens > 0:
            accepted = min(max(1, self.drafted - 1), tokens - 1)
            tokens -= accepted + 1
            stats = {"numDraftTokens": self.drafted, "numAcceptedTokens": accepted, "numRequestsWithDraftTokens": 1}
            self.told.append({"iter": len(self.told), "specDecodingStats": stats})

    def take(self) -> list[dict[str, Any]]:
        """Those that were not told yet."""
        told, self.told = self.told, []
        return told
