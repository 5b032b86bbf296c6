"""The build stage: turns a checkpoint and limits into an engine directory. The runtime enforces the limits.

The weights do not change, so engines of one checkpoint share one file. The build adds the config and the proof: the
runtime loads the engine once with these limits and generates a few tokens.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.base import USUAL_NUM_TOKENS, FailureClass, StageError, memory, version_of, write_json
from trtllm_pipeline.models import Fields, ModelFileError, model_files
from trtllm_pipeline.tensorrt.embedded.params import CONTEXT_STEP, BuildEmbedded
from trtllm_pipeline.tensorrt.embedded.runtime import CONFIG_FILE, MODEL_FILE, Limits, Runtime
from trtllm_pipeline.tensorrt.stage.base import StageContext

SCHEMA: Final = 1
PROOF_FILE: Final = "build.json"
_KV_BYTES: Final[Mapping[str, int]] = {"fp16": 2}
_PROOF_TOKENS: Final = 8


def run(context: StageContext[BuildEmbedded]) -> None:
    """Program of the stage. Input `checkpoint`: output of convert. Writes `model.gguf`, `config.json`, `build.json`."""
    checkpoint = context.inputs["checkpoint"]
    facts = _read_checkpoint(checkpoint)
    limits = _limits(context.params, int(facts["geometry"]["max_position_embeddings"]))
    kv_token_bytes = kv_cache_bytes_per_token(facts)
    slot_tokens = -(-limits.max_seq_len // CONTEXT_STEP) * CONTEXT_STEP
    kv_bytes = kv_token_bytes * slot_tokens * limits.max_batch_size
    weight_bytes = (checkpoint / MODEL_FILE).stat().st_size
    _check_memory(weight_bytes + kv_bytes, limits)

    model_files.link(checkpoint, MODEL_FILE, context.out / MODEL_FILE)
    config = {
        "schema": SCHEMA,
        "version": f"xllamacpp {version_of('xllamacpp')}",
        "architecture": facts["architecture"],
        "precision": facts["precision"],
        "quantization": facts["quantization"],
        "build_config": asdict(limits),
        "geometry": facts["geometry"],
        "parameters": facts["parameters"],
        "bos_token_id": facts["bos_token_id"],
        "eos_token_ids": facts["eos_token_ids"],
        "pad_token_id": facts["pad_token_id"],
        "kv_cache": {"precision": facts["kv_cache_precision"], "bytes_per_token": kv_token_bytes, "bytes": kv_bytes},
        "weights_bytes": weight_bytes,
    }
    write_json(context.out / CONFIG_FILE, config)
    proof = prove(context.out, int(facts["geometry"]["vocab_size"]))
    write_json(context.out / PROOF_FILE, proof)
    print(  # noqa: T201 - the stage's log
        f"loads in {proof['load_s']} s, {proof['resident_bytes'] / 1e6:.0f} MB resident, answers in {proof['generate_s']} s"
    )


def prove(engine: Path, vocab_size: int) -> dict[str, Any]:
    """Load an engine, generate from a prompt of its maximum length (but no longer than 64 tokens), and close it.

    Returns the measurements: `load_s`, `generate_s`, `resident_bytes` of this process with the engine loaded, `tokens`.
    """
    started = time.perf_counter()
    with Runtime(engine) as runtime:
        loaded = time.perf_counter()
        length = min(runtime.limits.max_input_len, 64)
        room = min(_PROOF_TOKENS, runtime.limits.max_seq_len - length)
        tokens, _, _ = runtime.generate([(7 + 31 * index) % vocab_size for index in range(length)], room)
        ended = time.perf_counter()
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    if len(tokens) != room or not all(0 <= token < vocab_size for token in tokens):
        raise StageError(f"the engine loaded, but generated {tokens} instead of {room} tokens")
    return {
        "load_s": round(loaded - started, 3),
        "generate_s": round(ended - loaded, 3),
        "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "tokens": tokens,
    }


def kv_cache_bytes_per_token(facts: Mapping[str, Any]) -> int:
    """Bytes of keys and values of one token, over all layers, for a checkpoint with these facts."""
    geometry = facts["geometry"]
    values = 2 * geometry["num_layers"] * geometry["num_kv_heads"] * geometry["head_dim"]
    return int(values * _KV_BYTES[facts["kv_cache_precision"]])


def _read_checkpoint(checkpoint: Path) -> Mapping[str, Any]:
    try:
        if model_files.find(checkpoint, MODEL_FILE) is None:
            raise _no_checkpoint(checkpoint, f"it has no {MODEL_FILE}")
        facts = Fields.read(checkpoint, CONFIG_FILE)
        if (schema := facts.integer("schema", least=0)) != SCHEMA:
            raise _no_checkpoint(checkpoint, f"its schema is {schema}, not {SCHEMA}")
        for name in ("architecture", "precision", "kv_cache_precision"):
            facts.required_text(name)
        if facts.text("kv_cache_precision") not in _KV_BYTES:
            raise facts.wrong("kv_cache_precision", f"one of {', '.join(_KV_BYTES)}")
        for name in ("num_layers", "num_kv_heads", "head_dim", "max_position_embeddings", "vocab_size"):
            facts.fields("geometry").integer(name)
        facts.integer("parameters", most=2**63)
        for name in ("bos_token_id", "eos_token_ids", "pad_token_id"):
            facts.token_ids(name)
        return {"bos_token_id": None, "pad_token_id": None, "eos_token_ids": [], "quantization": {}, **facts.values}
    except ModelFileError as error:
        raise _no_checkpoint(checkpoint, error.short) from error


def _no_checkpoint(folder: Path, reason: str) -> StageError:
    return StageError(
        f"{folder} is not a checkpoint of the embedded toolchain: {reason}",
        failure=FailureClass.USER,
        hint="create one with `pipeline stage convert`",
    )


def _limits(params: BuildEmbedded, context: int) -> Limits:
    limits = Limits(
        params.max_batch_size, params.max_input_len, params.max_seq_len, params.max_num_tokens or USUAL_NUM_TOKENS
    )
    if limits.max_seq_len <= limits.max_input_len:
        raise StageError(
            f"max_seq_len {limits.max_seq_len} leaves no room for an answer after max_input_len {limits.max_input_len}",
            failure=FailureClass.INFEASIBLE,
            hint="max_seq_len includes prompt and answer",
        )
    if limits.max_seq_len > context:
        raise StageError(
            f"max_seq_len {limits.max_seq_len} exceeds the {context} positions of the model",
            failure=FailureClass.INFEASIBLE,
            hint="choose lengths with at most that sum",
        )
    return limits


def _check_memory(needed: int, limits: Limits) -> None:
    """Reject limits that cannot fit, before llama.cpp exhausts the machine's memory."""
    total = memory.physical_bytes()
    if needed > total:
        raise StageError(
            f"weights and KV cache for {limits.max_batch_size} requests of {limits.max_seq_len} tokens need "
            f"{needed / 1e9:.1f} GB; this machine has {total / 1e9:.1f} GB",
            failure=FailureClass.OUT_OF_MEMORY,
            hint="a smaller max_batch_size or shorter lengths need less",
        )
