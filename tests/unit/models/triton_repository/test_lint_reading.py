"""What the linter and the filling of templates read: config.pbtxt with its lines, and engine directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trtllm_pipeline.models.triton_repository import model_config
from trtllm_pipeline.models.triton_repository.engine_config import Engine, EngineError
from trtllm_pipeline.models.triton_repository.model_config import ModelConfigError, Placeholder


@pytest.mark.parametrize(
    ("text", "kind", "line"),
    [
        ('name: "a"\nfoo: 1', "field", 2),
        ("input [ {\n name: 'x'\n data_type: TYPE_FLOAT } ]", "enum", 3),
        ("dynamic_batching {\n max_queue_delay_microseconds: -1 }", "value", 2),
        ("max_batch_size: four", "value", 1),
        ("name: 4", "value", 1),
        ('name: "a\n', "syntax", 1),
        ("input [ { name: 'x' }", "syntax", 1),
        ("dynamic_batching {}\nensemble_scheduling {}", "syntax", 2),
    ],
)
def test_faults_have_a_kind_and_a_line(text: str, kind: str, line: int) -> None:
    with pytest.raises(ModelConfigError, match=rf"^a.pbtxt:{line}: ") as error:
        model_config.parse(text, source="a.pbtxt")
    assert (error.value.kind, error.value.line) == (kind, line)


def test_placeholders_outside_comments() -> None:
    text = '# ${no} "\nmax_batch_size: ${one}\nname: "${two}-${three}" # ${no}\nbackend: \'it#s ${four}\''
    assert list(model_config.placeholders(text)) == [
        Placeholder("one", 2, quoted=False),
        Placeholder("two", 3, quoted=True),
        Placeholder("three", 3, quoted=True),
        Placeholder("four", 4, quoted=True),
    ]


@pytest.mark.parametrize(
    "value", ["a,b:c", 'say "hi"', "it's", "back\\slash\\n", "line\nbreak", "Größe 世", "# not", "\\g<0>"]
)
@pytest.mark.parametrize("quote", ["'", '"'])
def test_any_text_survives_substitution(value: str, quote: str) -> None:
    filled = model_config.substitute(f"# ${{x}}\nname: {quote}<${{x}}>{quote}", lambda _: value)
    assert model_config.parse(filled).name == f"<{value}>"
    assert model_config.parse(model_config.to_text(model_config.parse(filled))).name == f"<{value}>"


def write(folder: Path, config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config) if isinstance(config, dict | list) else config)
    return folder


def test_an_engine_of_release_0_8(tmp_path: Path) -> None:
    build = {"max_batch_size": 1, "max_input_len": 2048, "max_output_len": 1024, "max_beam_width": 1}
    config = {
        "version": "0.8.0",
        "pretrained_config": {"dtype": "float16", "logits_dtype": "float32", "mapping": {"tp_size": 4, "pp_size": 2}},
        "build_config": {**build, "plugin_config": {"paged_kv_cache": False, "use_paged_context_fmha": True}},
    }
    engine = Engine.of_trtllm_build(write(tmp_path, config))
    assert (engine.version, engine.world_size, engine.max_seq_len) == ("0.8.0", 8, 3072)
    assert (engine.paged_kv_cache, engine.paged_context_fmha) == (False, True)
    assert [path.name for path in engine.rank_files][::7] == ["rank0.engine", "rank7.engine"]


@pytest.mark.parametrize(
    ("mode", "more", "words", "length"),
    [
        (1, {}, None, 192),
        (2, {}, "draft_tokens_external", 182),
        ("SpeculativeDecodingMode.MEDUSA", {}, "speculativedecodingmode.medusa", 182),
        (8, {}, "lookahead_decoding", 182),
        (32, {"num_eagle_layers": 4}, "eagle", 178),
    ],
)
def test_room_for_drafted_tokens_is_not_for_requests(
    tmp_path: Path, mode: Any, more: dict[str, int], words: str | None, length: int
) -> None:
    build = {"max_input_len": 128, "max_seq_len": 192, "max_draft_len": 10, "speculative_decoding_mode": mode}
    engine = Engine.read(write(tmp_path, {"pretrained_config": more, "build_config": build}))
    assert (engine.speculation, engine.max_seq_len) == (words, length)
    assert engine.max_draft_len == (10 if words else 0)


def test_what_an_engine_does_not_say_is_none(tmp_path: Path) -> None:
    engine = Engine.of_trtllm_build(write(tmp_path, {"pretrained_config": {}, "build_config": {}}))
    assert engine == Engine(tmp_path)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", "not JSON"),
        ([], "it is not a JSON object"),
        ({"architecture": "LlamaForCausalLM"}, "trtllm-build did not write it"),
        ({"builder_config": {}, "plugin_config": {}}, "trtllm-build did not write it"),
    ],
)
def test_folders_that_are_no_engines(tmp_path: Path, config: Any, words: str) -> None:
    with pytest.raises(EngineError, match=r"is not an engine directory: config\.json: it is missing"):
        Engine.of_trtllm_build(tmp_path)
    with pytest.raises(EngineError, match=words):
        Engine.of_trtllm_build(write(tmp_path, config))
