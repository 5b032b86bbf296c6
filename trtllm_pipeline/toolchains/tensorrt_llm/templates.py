"""Fills the Triton templates of an installed TensorRT-LLM: every placeholder that a file has, whichever release it is of.

Values come from three places: settings of the user (`SETTINGS`, all that people fill by hand), facts of the engine, and
paths. What nobody set is taken out of the file, as the C++ backend has a default for whatever is absent; the few
parameters that a model reads without asking whether they are there become empty texts. Sources:
tensorrtllm_backend `inflight_batcher_llm/src/model_instance_state.cc` (0.16 to 0.19) and the models' Python code.

The result is parsed, so that what is written is always a valid `ModelConfig`.
"""

from __future__ import annotations

import difflib
import re
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final, Literal

from trtllm_pipeline.domain import Json
from trtllm_pipeline.errors import FailureClass, StageError
from trtllm_pipeline.stages.base import Option
from trtllm_pipeline.toolchains.tensorrt_llm.releases import at_least, parse
from trtllm_pipeline.triton_repository import model_config
from trtllm_pipeline.triton_repository.engine import Engine
from trtllm_pipeline.triton_repository.lint.rules.parameters import BACKENDS, BATCHING, DECODING_MODES, POLICIES

TEMPLATE_SET: Final = "inflight_batcher_llm"
MODELS: Final = ("preprocessing", "tensorrt_llm", "postprocessing", "ensemble", "tensorrt_llm_bls")
DATA_TYPES: Final = ("TYPE_FP16", "TYPE_BF16", "TYPE_FP32")
READ_WITHOUT_ASKING: Final = frozenset(
    (
        "tokenizer_dir",
        "xgrammar_tokenizer_info_path",
        "guided_decoding_backend",
        "visual_model_path",
        "multimodal_model_path",
    )
)
"""Parameters that must be there even without a value: models read them unconditionally, and take "" for unset."""
_LOGITS: Final = {"float32": "TYPE_FP32", "float16": "TYPE_FP16", "bfloat16": "TYPE_BF16"}
_BARE: Final = re.compile(r"[A-Za-z0-9_.+-]+")


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing that users set in a repository: its name in a matrix, and the placeholder that it fills."""

    name: str
    type: Literal["bool", "int", "float", "str", "ints"]
    """ints is a list of whole numbers, written with commas between them."""
    help: str
    default: Json = None
    """None leaves it to the release: the parameter is taken out of the file."""
    placeholder: str = ""
    """Where it is called otherwise than the setting."""
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    since: str | None = None
    """First recorded release whose templates have it; where files are installed, those decide."""
    until: str | None = None

    @property
    def fills(self) -> str:
        """The placeholder's name."""
        return self.placeholder or self.name

    def known_in(self, release: str) -> bool:
        """Whether the templates of `release` have it, by what was recorded."""
        begun = self.since is None or at_least(release, self.since)
        return begun and (self.until is None or parse(release) <= parse(self.until))

    def option(self) -> Option:
        """The stage's option for it. Those without a default take null, and so any JSON."""
        if self.default is None or self.type == "ints":
            return Option(self.name, "json", self.help, default=self.default)
        return Option(self.name, self.type, self.help, default=self.default, choices=self.choices)

    def text(self, value: Json) -> str:
        """`value` as it is written into a file. Raises StageError for one this setting cannot have."""
        fault = self._fault(value)
        if fault is not None:
            raise StageError(
                f"settings.repository.{self.name} is {value!r}; expected {fault}", failure=FailureClass.USER
            )
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, list):
            return ",".join(map(str, value))
        return str(value)

    def _fault(self, value: Json) -> str | None:
        """What was expected instead of `value`."""
        if self.choices and value not in self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.type == "ints":
            whole = isinstance(value, list) and value and all(type(each) is int and each >= 0 for each in value)
            return None if whole else "a list of whole numbers"
        if self.type == "bool":
            return None if isinstance(value, bool) else "true or false"
        if self.type == "str":
            return None if isinstance(value, str) and value else "a text"
        if isinstance(value, bool) or not isinstance(value, int if self.type == "int" else (int, float)):
            return "a whole number" if self.type == "int" else "a number"
        if self.least is not None and value < self.least:
            return f"at least {self.least:g}"
        if self.type == "float" and value <= 0 and self.least is None:
            return "more than 0"
        return None if self.most is None or value <= self.most else f"at most {self.most:g}"


def _counted(name: str, what: str, since: str) -> Setting:
    return Setting(name, "int", what, least=0, since=since)


SETTINGS: Final[tuple[Setting, ...]] = (
    Setting("decoupled", "bool", "answers may come in parts: needed for streaming", True, placeholder="decoupled_mode"),
    Setting("accumulate_tokens", "bool", "each streamed part holds the whole answer so far", False),
    Setting("exclude_input_in_output", "bool", "answers do not repeat the prompt", True),
    Setting(
        "preprocessing_instances",
        "int",
        "processes that tokenize",
        1,
        placeholder="preprocessing_instance_count",
        least=1,
    ),
    Setting(
        "postprocessing_instances",
        "int",
        "processes that turn tokens into text",
        1,
        placeholder="postprocessing_instance_count",
        least=1,
    ),
    Setting("bls_instances", "int", "processes of tensorrt_llm_bls", 1, placeholder="bls_instance_count", least=1),
    Setting("max_queue_delay_microseconds", "int", "how long Triton may hold a request back to batch it", 0, least=0),
    Setting("max_queue_size", "int", "requests that may wait; 0 is without limit", 0, least=0, since="0.12.0"),
    Setting("enable_kv_cache_reuse", "bool", "keep the KV cache of prompt beginnings", False),
    Setting("batching_strategy", "str", "how requests are batched", BATCHING[0], choices=BATCHING[:3]),
    Setting(
        "batch_scheduler_policy",
        "str",
        "guaranteed_no_evict finishes what it started; max_utilization packs tighter and may pause requests",
        POLICIES[0],
        choices=POLICIES,
    ),
    Setting(
        "kv_cache_free_gpu_mem_fraction", "float", "share of the memory left after loading for the KV cache", most=1
    ),
    Setting("max_tokens_in_paged_kv_cache", "int", "tokens in the KV cache; the smaller limit wins", least=1),
    Setting("cross_kv_cache_fraction", "float", "share of the KV cache for cross attention", most=1, since="0.14.0"),
    Setting("max_attention_window_size", "ints", "sliding windows in tokens, one or one for each layer"),
    _counted("sink_token_length", "tokens kept at the beginning of a sliding window", since="0.10.0"),
    _counted("kv_cache_host_memory_bytes", "host memory that KV blocks are moved to", since="0.10.0"),
    Setting("kv_cache_onboard_blocks", "bool", "move blocks back from the host before use", since="0.10.0"),
    Setting("enable_chunked_context", "bool", "split long prompts over several passes"),
    Setting("max_beam_width", "int", "beams of a request", 1, least=1),
    Setting("normalize_log_probs", "bool", "divide log probabilities by the length"),
    Setting("decoding_mode", "str", "how tokens are chosen", choices=DECODING_MODES, since="0.10.0"),
    Setting("medusa_choices", "str", "the tree of Medusa, as {0, 0, 0}, {0, 1}", since="0.10.0"),
    Setting("eagle_choices", "str", "the tree of Eagle, as {0, 0, 0}, {0, 1}", since="0.16.0"),
    _counted("lookahead_window_size", "of lookahead decoding", since="0.19.0"),
    _counted("lookahead_ngram_size", "of lookahead decoding", since="0.19.0"),
    _counted("lookahead_verification_set_size", "of lookahead decoding", since="0.19.0"),
    Setting("speculative_decoding_fast_logits", "bool", "pass draft logits on the GPU", since="0.16.0"),
    Setting("guided_decoding_backend", "str", "grammar engine", choices=("xgrammar",), since="0.19.0"),
    Setting("xgrammar_tokenizer_info_path", "str", "JSON file with the vocabulary for xgrammar", since="0.19.0"),
    _counted("lora_cache_optimal_adapter_size", "rank that the LoRA cache is laid out for", since="0.10.0"),
    _counted("lora_cache_max_adapter_size", "largest rank in the LoRA cache", since="0.10.0"),
    Setting("lora_cache_gpu_memory_fraction", "float", "share of free GPU memory for LoRA", most=1, since="0.10.0"),
    _counted("lora_cache_host_memory_bytes", "host memory for LoRA weights", since="0.10.0"),
    Setting("lora_prefetch_dir", "str", "folder of LoRA weights loaded at the start", since="0.19.0"),
    Setting("gpu_device_ids", "ints", "GPUs of the ranks, in order"),
    Setting("participant_ids", "ints", "MPI ranks that run this model", since="0.14.0"),
    Setting("num_nodes", "int", "hosts of the ranks", least=1, since="0.19.0"),
    Setting("gpu_weights_percent", "float", "share of the weights kept on the GPU", least=0, most=1, since="0.10.0"),
    Setting("multi_block_mode", "bool", "split long attention over blocks", since="0.12.0"),
    Setting("enable_context_fmha_fp32_acc", "bool", "accumulate context attention in FP32", since="0.12.0"),
    Setting("cuda_graph_mode", "bool", "replay decoding steps as CUDA graphs", since="0.16.0"),
    _counted("cuda_graph_cache_size", "CUDA graphs kept", since="0.16.0"),
    _counted("cancellation_check_period_ms", "how often cancelled requests are looked for", since="0.10.0"),
    _counted("stats_check_period_ms", "how often statistics are read", since="0.10.0"),
    _counted("iter_stats_max_iterations", "steps whose statistics are kept", since="0.10.0"),
    _counted("request_stats_max_iterations", "steps whose requests' statistics are kept", since="0.10.0"),
    Setting("enable_trt_overlap", "bool", "overlap two half batches", until="0.8.0"),
    Setting("add_special_tokens", "bool", "the tokenizer adds its beginning and end tokens", False, since="0.10.0"),
    Setting("skip_special_tokens", "bool", "answers leave special tokens out", True, since="0.11.0"),
    Setting("tokenizer_type", "str", "class of the tokenizer", "auto", choices=("auto", "llama", "t5"), until="0.8.0"),
    Setting("triton_backend", "str", "what runs the engine", BACKENDS[0], choices=BACKENDS, since="0.10.0"),
    Setting("logits_datatype", "str", "type of logits; null is the engine's", choices=DATA_TYPES, since="0.18.0"),
    Setting(
        "encoder_input_features_data_type",
        "str",
        "type of an encoder's input; TYPE_BF16 for mllama",
        "TYPE_FP16",
        choices=DATA_TYPES,
        since="0.16.0",
    ),
    Setting(
        "prompt_embedding_table_data_type",
        "str",
        "type of prompt tables",
        "TYPE_FP16",
        choices=DATA_TYPES,
        since="1.1.0rc6",
    ),
    Setting("max_num_images", "int", "images of a request", least=1, since="0.16.0"),
    Setting("multimodal_model_path", "str", "folder of the vision engines", since="0.19.0"),
    Setting("visual_model_path", "str", "folder of the vision engines", since="0.12.0", until="0.18.2"),
    Setting("multimodal_encoders_name", "str", "model that tensorrt_llm_bls sends images to", since="0.14.0"),
    Setting("encoder_engine_dir", "str", "engine folder of the encoder", since="0.11.0"),
    Setting("tensorrt_llm_model_name", "str", "model that tensorrt_llm_bls calls", "tensorrt_llm", since="0.10.0"),
    Setting("tensorrt_llm_draft_model_name", "str", "model that drafts tokens for it", since="0.10.0"),
)
BY_NAME: Final[Mapping[str, Setting]] = {setting.name: setting for setting in SETTINGS}
FIXED: Final = ("triton_max_batch_size", "engine_dir", "tokenizer_dir")
"""Placeholders that no setting fills: they follow from the engine and the model."""


def values_of(settings: Mapping[str, Json], *, engine: Engine, tokenizer: Path, max_batch_size: int) -> dict[str, str]:
    """What each known placeholder is filled with; those without a value are absent.

    `settings` may leave any of SETTINGS out. Raises StageError for values that cannot be, and for unknown settings.
    """
    for name in settings:
        if name not in BY_NAME:
            raise StageError(
                f"settings.repository.{name}: there is no such setting",
                failure=FailureClass.USER,
                hint="`parameters: {NAME: VALUE}` fills any other placeholder of the templates",
            )
    given = {setting: settings.get(setting.name, setting.default) for setting in SETTINGS}
    values = {setting.fills: setting.text(value) for setting, value in given.items() if value is not None}
    values.setdefault("logits_datatype", _LOGITS.get(engine.logits_dtype or "", "TYPE_FP32"))
    if engine.max_batch_size is not None and not 1 <= max_batch_size <= engine.max_batch_size:
        raise StageError(
            f"max_batch_size is {max_batch_size}; expected 1 to {engine.max_batch_size}, the engine's max_batch_size",
            failure=FailureClass.INFEASIBLE,
        )
    return {
        **values,
        "triton_max_batch_size": str(max_batch_size),
        "engine_dir": str(engine.folder.absolute()),
        "tokenizer_dir": str(tokenizer.absolute()),
    }


def fill(
    templates: Path,
    out: Path,
    values: Mapping[str, str],
    *,
    release: str,
    asked: Iterable[str] = (),
    models: Sequence[str] = MODELS,
) -> None:
    """Write `models` into the folder `out`, filled from `all_models/inflight_batcher_llm` at `templates`.

    `asked` are the placeholders the user gave a value: StageError when no file has one of them, since the setting would
    have no effect. Other errors: no such templates, a bare placeholder without a value, a result that is no ModelConfig.
    """
    source = templates / TEMPLATE_SET
    lacking = [name for name in models if not (source / name / model_config.FILE_NAME).is_file()]
    if lacking:
        raise StageError(
            f"{source} has no templates for {', '.join(lacking)}",
            failure=FailureClass.USER,
            hint=f"name the all_models folder of TensorRT-LLM {release}: pipeline doctor shows where it was looked for",
        )
    texts = {name: (source / name / model_config.FILE_NAME).read_text(encoding="utf-8") for name in models}
    check_asked(asked, _places(texts.values()), release)
    for name, text in texts.items():
        path = source / name / model_config.FILE_NAME
        filled = model_config.to_text(fill_text(text, values, path=path, release=release))
        shutil.copytree(source / name, out / name, ignore=shutil.ignore_patterns("__pycache__"))
        (out / name / model_config.FILE_NAME).write_text(filled, encoding="utf-8")
        # An empty folder does not survive every way of copying folders, and Triton wants one for each version.
        (out / name / "1").mkdir(exist_ok=True)
        if not any((out / name / "1").iterdir()):
            (out / name / "1" / ".keep").touch()


def fill_text(text: str, values: Mapping[str, str], *, path: Path, release: str) -> model_config.ModelConfig:
    """The ModelConfig of one template text. `path` and `release` are for errors, which are StageErrors."""

    def value(place: model_config.Placeholder) -> str:
        found = values.get(place.name)
        if place.quoted:
            return f"${{{place.name}}}" if found is None else found
        if found is None:
            raise StageError(
                f"{path}:{place.line}: no value for ${{{place.name}}}, which TensorRT-LLM {release} needs there",
                failure=FailureClass.USER,
                hint=f"settings.repository.parameters: {{{place.name}: VALUE}}",
            )
        if not _BARE.fullmatch(found):
            raise StageError(
                f"{path}:{place.line}: ${{{place.name}}} stands for a number or a word, {found!r} is neither",
                failure=FailureClass.USER,
            )
        return found

    try:
        config = model_config.parse(model_config.substitute(text, value), source=str(path))
    except model_config.ModelConfigError as error:
        raise StageError(
            f"{error.message}, after filling",
            failure=FailureClass.USER,
            hint="a value of the wrong kind was filled in, or the template is not one of TensorRT-LLM",
        ) from error
    unset = {place.name for place in model_config.placeholders(text) if place.name not in values}
    for key in list(config.parameters):
        if any(f"${{{name}}}" in config.parameters[key].string_value for name in unset):
            _leave_unset(config, key)
    left = next(model_config.placeholders(model_config.to_text(config)), None)
    if left is not None:
        raise StageError(
            f"{path}: no value for ${{{left.name}}}, which TensorRT-LLM {release} has outside its parameters",
            failure=FailureClass.USER,
            hint=f"settings.repository.parameters: {{{left.name}: VALUE}}",
        )
    return config


def _leave_unset(config: model_config.ModelConfig, key: str) -> None:
    """Take a parameter out, or leave it empty where the model would miss it."""
    known = {setting.fills for setting in SETTINGS}
    if key in READ_WITHOUT_ASKING or (config.backend == "python" and key not in known):
        config.parameters[key].string_value = ""
    else:
        del config.parameters[key]


def asked(settings: Mapping[str, Json], parameters: Iterable[str]) -> set[str]:
    """Placeholders that a user gave a value: a default says nothing, whether the release has it or not."""
    given = {BY_NAME[name].fills for name, value in settings.items() if value not in (None, BY_NAME[name].default)}
    return {*given, *parameters}


@lru_cache(maxsize=8)
def installed_places(templates: Path) -> frozenset[str] | None:
    """Placeholders of the models in `all_models` at `templates`, None where one of them is not there."""
    files = [templates / TEMPLATE_SET / name / model_config.FILE_NAME for name in MODELS]
    try:
        return _places(file.read_text(encoding="utf-8") for file in files)
    except OSError:
        return None


def recorded_places(release: str, parameters: Iterable[str]) -> frozenset[str]:
    """Placeholders of a release that is not at hand: those of the settings it is known to have, and all `parameters`."""
    known = {setting.fills for setting in SETTINGS if setting.known_in(release)}
    return frozenset((*known, *parameters))


def _places(texts: Iterable[str]) -> frozenset[str]:
    return frozenset(place.name for text in texts for place in model_config.placeholders(text))


def check_asked(asked: Iterable[str], places: Collection[str], release: str) -> None:
    """Raise StageError where one of the placeholders `asked` is not among `places`: its value would have no effect."""
    unknown = sorted(set(asked) - set(places))
    if not unknown:
        return
    by_placeholder = {setting.fills: setting for setting in SETTINGS}
    setting = by_placeholder.get(unknown[0])
    known = [] if setting is None else [f"from {setting.since} on"] * bool(setting.since)
    known += [] if setting is None else [f"up to {setting.until}"] * bool(setting.until)
    span = f", which are known to have it {' and '.join(known)}" if known else ""
    close = [] if setting else difflib.get_close_matches(unknown[0], sorted(places), n=1)
    raise StageError(
        f"settings.repository.{setting.name if setting else f'parameters.{unknown[0]}'}: no template of TensorRT-LLM "
        f"{release} has ${{{unknown[0]}}}{span}",
        failure=FailureClass.USER,
        hint=f"did you mean {close[0]!r}?" if close else "remove it",
    )


def texts(parameters: Json) -> dict[str, str]:
    """Values of placeholders as they are written. Raises StageError for those that cannot be, and for what settings fill."""
    if not isinstance(parameters, dict):
        raise StageError(
            f"settings.repository.parameters is {parameters!r}; expected {{NAME: VALUE}}", failure=FailureClass.USER
        )
    known = {setting.fills: setting.name for setting in SETTINGS}
    found = {}
    for name, value in parameters.items():
        if name in known or name in FIXED:
            said = f"use settings.repository.{known[name]}" if name in known else "it follows from the engine and model"
            raise StageError(f"settings.repository.parameters.{name}: {said}", failure=FailureClass.USER)
        if isinstance(value, bool):
            found[name] = "true" if value else "false"
        elif isinstance(value, str | int | float):
            found[name] = str(value)
        else:
            raise StageError(
                f"settings.repository.parameters.{name} is {value!r}; expected a text, number or switch",
                failure=FailureClass.USER,
            )
    return found
