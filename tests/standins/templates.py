"""Writes the Triton template folder (`all_models`) that a release of TensorRT-LLM would have installed.

Models, tensors, parameters and placeholders are those recorded in `tests/data/tensorrt_llm/templates.json`. The maps of
the ensemble were not recorded: they are wired here by the tensors' names. The models' Python code is ours (`models/`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

RECORDED: Final = Path(__file__).resolve().parents[1] / "data" / "tensorrt_llm" / "templates.json"
_ROOT: Final = Path(__file__).resolve().parents[2]
CODE: Final = Path(__file__).parent / "models"
ENGINE_SET: Final = "inflight_batcher_llm"
LLMAPI_SET: Final = "llmapi"
IMAGE_SET: Final = "multimodal"
"""An ensemble and a model beside those of ENGINE_SET."""
MODELS: Final = ("preprocessing", "tensorrt_llm", "postprocessing", "ensemble", "tensorrt_llm_bls")

_TO_PREPROCESSING: Final = {
    # input of preprocessing -> input of the ensemble
    "QUERY": "text_input",
    "DECODER_QUERY": "decoder_text_input",
    "IMAGE": "image_input",
    "IMAGE_BYTES": "image_bytes_input",
    "IMAGE_URL": "image_url_input",
    "VIDEO_BYTES": "video_bytes_input",
    "REQUEST_OUTPUT_LEN": "max_tokens",
    "BAD_WORDS_DICT": "bad_words",
    "STOP_WORDS_DICT": "stop_words",
    "EMBEDDING_BIAS_WORDS": "embedding_bias_words",
    "EMBEDDING_BIAS_WEIGHTS": "embedding_bias_weights",
    "END_ID": "end_id",
    "PAD_ID": "pad_id",
    "PROMPT_EMBEDDING_TABLE": "prompt_embedding_table",
    "PROMPT_TABLE_EXTRA_ID": "prompt_table_extra_id",
}
_FROM_PREPROCESSING: Final = {
    # input of tensorrt_llm -> output of preprocessing
    "input_ids": "INPUT_ID",
    "decoder_input_ids": "DECODER_INPUT_ID",
    "input_lengths": "REQUEST_INPUT_LEN",
    "decoder_input_lengths": "REQUEST_DECODER_INPUT_LEN",
    "request_output_len": "REQUEST_OUTPUT_LEN",
    "stop_words_list": "STOP_WORDS_IDS",
    "bad_words_list": "BAD_WORDS_IDS",
    "embedding_bias": "EMBEDDING_BIAS",
    "end_id": "OUT_END_ID",
    "pad_id": "OUT_PAD_ID",
    "prompt_embedding_table": "OUT_PROMPT_EMBEDDING_TABLE",
    "prompt_table_extra_ids": "OUT_PROMPT_TABLE_EXTRA_IDS",
}
_FROM_REQUEST: Final = {
    # input of tensorrt_llm -> input of the ensemble, where they differ
    "runtime_top_k": "top_k",
    "runtime_top_p": "top_p",
    "len_penalty": "length_penalty",
    "streaming": "stream",
    "min_tokens": "min_length",
    "seed": "random_seed",
}


@lru_cache(maxsize=1)
def _recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8"))["releases"]
    return found


def releases() -> tuple[str, ...]:
    """The recorded releases, the oldest first."""
    return tuple(_recorded())


def nearest(release: str, template_set: str = ENGINE_SET) -> str:
    """The newest recorded release up to `release` that has `template_set`, as far as anybody knows the same templates.

    Raises ValueError where there is none.
    """
    from packaging.version import Version

    older = [name for name in releases() if Version(name) <= Version(release) and template_set in _recorded()[name]]
    if not older:
        raise ValueError(f"no templates {template_set} are known up to {release}")
    return older[-1]


def model(release: str, name: str, template_set: str = ENGINE_SET) -> dict[str, Any]:
    """What was recorded of one model in a recorded release."""
    found: dict[str, Any] = _recorded()[release][template_set][name]
    return model(found["as"], name, template_set) if "as" in found else found


def install(folder: Path, release: str) -> Path:
    """Write all the template sets of `release` under `folder/all_models` and return that."""
    root = folder / "all_models"
    for template_set in (ENGINE_SET, LLMAPI_SET, IMAGE_SET):
        try:
            known = nearest(release, template_set)
        except ValueError:
            continue
        for name in _recorded()[known][template_set]:
            _write(root / template_set / name, name, known, template_set)
    return root


def _write(folder: Path, name: str, release: str, template_set: str) -> None:
    facts = model(release, name, template_set)
    for file in facts["files"]:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        own = CODE / template_set / name / Path(file).name
        text = own.read_text(encoding="utf-8").replace("@ROOT@", str(_ROOT)) if own.is_file() else _stub(path)
        path.write_text(text, encoding="utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    steps = wiring(release, template_set) if "steps" in facts else ()
    text = "\n".join(_config(name, facts, steps)) + "\n"
    (folder / "config.pbtxt").write_text(text, encoding="utf-8")


def _stub(path: Path) -> str:
    if path.suffix == ".yaml":
        return "model: an example's name\nbackend: pytorch\ntriton_config:\n  max_batch_size: 0\n  decoupled: false\n"
    return '"""Stands where a template has its code."""\n' if path.suffix == ".py" else ""


def names(tensors: Sequence[str]) -> list[str]:
    """Names of recorded tensors."""
    return [tensor.split()[0] for tensor in tensors]


def wiring(release: str, template_set: str = ENGINE_SET) -> list[tuple[str, dict[str, str], dict[str, str]]]:
    """The steps of a recorded release's ensemble: model, input_map, output_map."""
    pre, engine, post = (model(release, name) for name in ("preprocessing", "tensorrt_llm", "postprocessing"))
    ensemble = model(release, "ensemble", template_set)
    seen = names(model(release, "multimodal_encoders", template_set)["outputs"]) if template_set == IMAGE_SET else []
    requests, answers = names(ensemble["inputs"]), names(ensemble["outputs"])
    before = {name: _TO_PREPROCESSING[name] for name in names(pre["inputs"]) if _TO_PREPROCESSING.get(name) in requests}
    into: dict[str, str] = {}
    for name in names(engine["inputs"]):
        source = _FROM_REQUEST.get(name, name)
        if (feature := _feature(name, seen)) is not None:
            into[name] = f"_SEEN_{feature}"
        elif _FROM_PREPROCESSING.get(name) in names(pre["outputs"]):
            into[name] = f"_{_FROM_PREPROCESSING[name]}"
        elif source in requests:
            into[name] = source
    out = {"output_ids": "_TOKENS_BATCH", "sequence_length": "_SEQUENCE_LENGTH"}
    after = {"TOKENS_BATCH": "_TOKENS_BATCH", "SEQUENCE_LENGTH": "_SEQUENCE_LENGTH"}
    text = {"OUTPUT": "text_output"}
    for name in names(engine["outputs"])[2:]:
        if name.upper() in names(post["inputs"]):  # to release 0.12 everything went through postprocessing
            out[name] = after[name.upper()] = f"_{name.upper()}"
            text[f"OUT_{name.upper()}"] = name
        elif name in answers:
            out[name] = name
    encoders = _encoders(release, template_set, names(pre["outputs"]), requests, set(into.values()))
    used = {*into.values(), *after.values(), *(name for _, given, _ in encoders for name in given.values())}
    taken = {name: f"_{name}" for name in names(pre["outputs"]) if f"_{name}" in used}
    return [("preprocessing", before, taken), *encoders, ("tensorrt_llm", into, out), ("postprocessing", after, text)]


def _feature(name: str, seen: Sequence[str]) -> str | None:
    """The output of the encoders that an input of tensorrt_llm takes, or None."""
    return next((each for each in (name.upper(), f"OUT_{name.upper()}") if each in seen), None)


def _encoders(
    release: str, template_set: str, prepared: Sequence[str], requests: Sequence[str], wanted: set[str]
) -> list[tuple[str, dict[str, str], dict[str, str]]]:
    """The step that sees, of an ensemble that has it."""
    if template_set != IMAGE_SET:
        return []
    facts = model(release, "multimodal_encoders", template_set)
    given = {"max_tokens": "_REQUEST_OUTPUT_LEN"} if "max_tokens" in names(facts["inputs"]) else {}
    given |= {"IMAGE": "image_input"} if "image_input" in requests else {}
    given |= {name: f"_{name.upper()}" for name in names(facts["inputs"]) if name.upper() in prepared}
    made = {name: f"_SEEN_{name}" for name in names(facts["outputs"]) if f"_SEEN_{name}" in wanted}
    return [("multimodal_encoders", given, made)]


def _config(
    name: str, facts: Mapping[str, Any], steps: Sequence[tuple[str, dict[str, str], dict[str, str]]]
) -> Iterator[str]:
    """The lines of a config.pbtxt, in the ways that templates write them: comments, quotes, colons here and there."""
    yield f'# A model\'s configuration; "{name}" is its folder.'
    yield f'name: "{name}"'
    yield from (f'{key}: "{facts[key]}"' for key in ("backend", "platform") if key in facts)
    if "max_batch_size" in facts:
        yield f"max_batch_size: {facts['max_batch_size']}"
    if "decoupled" in facts:
        yield f"\nmodel_transaction_policy {{\n  decoupled: {facts['decoupled']}\n}}"
    if "dynamic_batching" in facts:
        yield from _batching(facts["dynamic_batching"])
    for kind in ("input", "output"):
        yield f"\n{kind} ["
        yield ",\n".join(_tensor(tensor) for tensor in facts[f"{kind}s"])
        yield "]"
    if steps:
        yield "ensemble_scheduling {\n  step ["
        yield ",\n".join("\n".join(_step(*step)) for step in steps)
        yield "  ]\n}"
    if "instance_group" in facts:
        group = facts["instance_group"]
        yield f"instance_group [\n  {{\n    count: {group['count']}\n    kind : {group['kind']}\n  }}\n]"
    for index, (key, value) in enumerate(facts.get("parameters", {}).items()):
        colon = ":" if index % 2 else ""
        yield f'parameters{colon} {{\n  key: "{key}"\n  value: {{\n    string_value: "{value}"\n  }}\n}}'
    yield from (f"# set by ${{{each}}} once" for each in facts.get("placeholders_in_comments", ()))


def _batching(facts: Mapping[str, Any]) -> Iterator[str]:
    yield "dynamic_batching {"
    if "preferred_batch_size" in facts:
        yield f"  preferred_batch_size: [ {', '.join(facts['preferred_batch_size'])} ]"
        yield f"  max_queue_delay_microseconds: {facts['max_queue_delay_microseconds']}"
    if "default_queue_policy" in facts:
        yield f"  default_queue_policy: {{ max_queue_size: {facts['default_queue_policy']['max_queue_size']} }}"
    yield "}"


def _tensor(text: str) -> str:
    name, kind, dims, *marks = text.split()
    lines = [
        f'    name: "{name}"',
        f"    data_type: {kind if kind.startswith('$') else 'TYPE_' + kind}",
        f"    dims: {dims}",
    ]
    lines += ["    reshape: { shape: [ ] }"] if "scalar" in marks else []
    lines += ["    allow_ragged_batch: true"] if "ragged" in marks else []
    lines += ["    optional: true"] if "optional" in marks else []
    return "  {\n" + "\n".join(lines) + "\n  }"


def _step(name: str, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> Iterator[str]:
    yield f'    {{\n      model_name: "{name}"\n      model_version: -1'
    for kind, names_ in (("input_map", inputs), ("output_map", outputs)):
        yield from (
            f'      {kind} {{\n        key: "{key}"\n        value: "{value}"\n      }}'
            for key, value in names_.items()
        )
    yield "    }"
