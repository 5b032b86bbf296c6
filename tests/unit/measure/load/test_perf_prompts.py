from __future__ import annotations

import json
import os
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from tests.helpers.chat_models import write_model
from trtllm_pipeline.base.errors import MatrixError, StageError
from trtllm_pipeline.base.machine.model import Machine
from trtllm_pipeline.measure.client import images
from trtllm_pipeline.measure.load import prompts
from trtllm_pipeline.measure.load.conditions import prompts_digest
from trtllm_pipeline.measure.load.load import warmup_prompt
from trtllm_pipeline.measure.load.prompts import Prompt, chat_renderer, read_prompts
from trtllm_pipeline.measure.load.workloads import Workload, made
from trtllm_pipeline.tensorrt.stage.base import Stage
from trtllm_pipeline.tensorrt.stage.params import PerfParams
from trtllm_pipeline.tensorrt.toolchains.common_stages import ACCURACY, PERF, SCORE

BUILTIN = Path(__file__).parents[4] / "trtllm_pipeline" / "data" / "builtin"


def test_every_form_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        '\ufeff{"input": "a", "mine": 1}\n\n{"text_input": "b", "id": 7, "max_tokens": 3}\n'
        '{"messages": [{"role": "user", "content": "c"}], "output": ["x", "y"], "stop_words": "."}\n',
        encoding="utf-8",
    )
    assert read_prompts(path, lambda messages: f"<{messages[0]['content']}>") == (
        Prompt("1", "a"),
        Prompt("7", "b", 3),
        Prompt("4", "<c>", None, ("x", "y"), (".",), ({"role": "user", "content": "c"},)),
    )


def test_all_faults_at_once_with_their_lines(tmp_path: Path) -> None:
    lines = [
        "{",
        "[]",
        "{}",
        '{"input": "a", "messages": []}',
        '{"input": " "}',
        '{"input": 3}',
        '{"messages": [{"role": "user", "content": "c"}]}',
        '{"input": "a", "max_tokens": true}',
        '{"input": "a", "output": [1]}',
        '{"input": "a", "stop_words": [""]}',
        '{"input": "a", "id": "same"}',
        '{"input": "b", "id": "same"}',
    ]
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(MatrixError) as caught:
        read_prompts(path)
    assert [fault.line for fault in caught.value.faults] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12]


def test_a_file_without_prompts_or_without_text(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("\n \n", encoding="utf-8")
    with pytest.raises(MatrixError, match="no prompt"):
        read_prompts(path)
    with pytest.raises(MatrixError, match="missing: there is no such file"):
        read_prompts(tmp_path / "missing")


def test_chat_template(tmp_path: Path) -> None:

    with chat_renderer(tmp_path, lambda: False) as none:
        assert none is None
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('role') }}{% endif %}"
        "[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    settings = {"chat_template": template, "bos_token": {"content": "<s>"}, "eos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    path = tmp_path / "p.jsonl"
    path.write_text('{"messages": [{"role": "bad", "content": ""}]}', encoding="utf-8")
    with chat_renderer(tmp_path, lambda: False) as render:
        assert render([{"role": "user", "content": "hi"}]) == "<s>[hi]>"
        with pytest.raises(MatrixError, match=r"p\.jsonl:1: messages: .* rejects this conversation: role"):
            read_prompts(path, render)


TOOL = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object", "properties": {}}}}
ASKS = [{"role": "user", "content": "list files"}]


def test_what_a_chat_request_has_beside_its_messages(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    request = {
        "tools": [TOOL],
        "tool_choice": "auto",
        "response_format": {"type": "json_object"},
        "chat_template_kwargs": {"enable_thinking": False},
        "temperature": 0.5,
        "seed": 7,
    }
    others = {"model": "m", "stream": True, "mine": 1, "n": 1, "top_p": None}
    row = {"messages": ASKS, **request, **others, "stop": ["x"], "max_completion_tokens": 5}
    path.write_text(json.dumps(row) + "\n" + json.dumps({"input": "a", "temperature": "warm", "tools": "hammer"}))
    variables: list[object] = []

    def render(messages: object, **more: object) -> str:
        variables.append(more)
        return str(messages)

    prompt, plain = read_prompts(path, render)
    assert (prompt.request, prompt.stop_words, prompt.max_tokens) == (request, ("x",), 5)
    assert variables == [{"tools": [TOOL], "variables": {"enable_thinking": False}}]
    assert plain == Prompt("2", "a")
    assert prompts_digest([prompt]) != prompts_digest([replace(prompt, request={})])


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"tools": TOOL}, "tools: expected a list, got"),
        ({"tool_choice": 3}, "tool_choice: expected a text or an object, got 3"),
        ({"response_format": "json"}, "response_format: expected an object, got 'json'"),
        ({"temperature": True}, "temperature: expected an integer or a number, got True"),
        ({"seed": 0.5}, "seed: expected an integer, got 0.5"),
        ({"n": 2}, "n: expected 1, one choice per request, got 2"),
    ],
)
def test_fields_of_a_chat_request_of_another_type_are_refused(
    tmp_path: Path, row: dict[str, object], told: str
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"messages": ASKS, **row}))
    with pytest.raises(MatrixError, match=re.escape(f"p.jsonl:1: {told}")):
        read_prompts(path, lambda _messages, **_more: "x")


def test_a_chat_template_gets_the_tools_of_a_row(tmp_path: Path) -> None:
    template = (
        "{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}{{ messages[0].content }}{{ enable_thinking }}"
    )
    (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    path = tmp_path / "p.jsonl"
    rows = ({"tools": [TOOL], "chat_template_kwargs": {"enable_thinking": 1}}, {"tools": [TOOL], "tool_choice": "none"})
    path.write_text("\n".join(json.dumps({"messages": ASKS, **row}) for row in rows))
    with chat_renderer(tmp_path, lambda: False) as render:
        assert [prompt.text for prompt in read_prompts(path, render)] == ["<ls>list files1", "list files"]


@pytest.mark.parametrize(("adds", "prompt"), [(True, "[hi]"), (False, "<s>[hi]")])
def test_a_prompt_has_its_first_token_once(tmp_path: Path, adds: bool, prompt: str) -> None:
    write_model(tmp_path, "<s>[{{ messages[0].content }}]", ["<s>"])
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    first = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", first)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with chat_renderer(tmp_path, lambda: adds) as render:
        text = render([{"role": "user", "content": "hi"}])
    assert text == prompt
    ids = tokenizer.encode(text, add_special_tokens=adds).ids
    assert (ids[0], ids.count(first)) == (first, 1)


def test_the_built_in_prompts() -> None:
    assert len(read_prompts(BUILTIN / "prompts.jsonl")) == 28
    accuracy = read_prompts(BUILTIN / "accuracy.jsonl")
    assert len(accuracy) == 28
    assert all(prompt.references for prompt in accuracy)


def test_a_line_ends_at_a_line_feed_only(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"input": "one\u2028two\x85three"}\r\n{"input": "four"}\n', encoding="utf-8")
    assert [prompt.text for prompt in read_prompts(path)] == ["one\u2028two\x85three", "four"]


@pytest.mark.parametrize("length", [2, 17, 256, pytest.param(12_000, marks=pytest.mark.thorough)])
def test_prompts_have_the_length_asked_for(tokenizer: Tokenizer, length: int) -> None:
    prompts = made(tokenizer, Workload(input_tokens=length, prompts=6, seed=4))
    assert [len(tokenizer.encode(prompt.text).ids) for prompt in prompts] == [length] * 6
    assert {prompt.input_tokens for prompt in prompts} == {length}
    assert prompts == made(tokenizer, Workload(input_tokens=length, prompts=6, seed=4))
    assert len({prompt.id for prompt in prompts}) == 6


def test_a_prompt_needs_room_for_special_tokens(tokenizer: Tokenizer) -> None:
    with pytest.raises(StageError, match="cannot have 1 tokens: 1 are special"):
        made(tokenizer, Workload(input_tokens=1, prompts=1))


def test_rows_may_name_images_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(images.png(8, 8, 0))
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input": "What is it?", "image": "a.png"}\n{"input": "Hello"}\n', encoding="utf-8")
    pictured, plain = prompts.read_prompts(path)
    assert (pictured.images, plain.images) == (1, 0)
    assert pictured.messages[0]["content"][1]["image_url"]["url"].startswith("data:image/png;base64,")
    assert pictured.text == "What is it?"
    assert prompts.image_files(path) == {"a.png": 1}
    path.write_text('{"input": "What is it?", "image": ["a.png", "b.png"]}\n', encoding="utf-8")
    with pytest.raises(MatrixError, match="cannot be read: No such file"):
        prompts.read_prompts(path)
    named = prompts.image_files(path)
    assert named == {"a.png": 1, "b.png": 1}
    with pytest.raises(MatrixError, match=r"rows\.jsonl:1: image: 'b\.png' cannot be read: No such file"):
        prompts.check_images(path, named)
    (tmp_path / "b.png").write_text("text")
    with pytest.raises(MatrixError, match=r"'b\.png' is not a PNG, JPEG, GIF or WebP image"):
        prompts.check_images(path, named)


def test_images_are_seen_in_an_array_and_in_a_table_too(tmp_path: Path) -> None:
    """A plan needs the images to know the requests and the files to digest."""
    array = tmp_path / "rows.json"
    for text in ('[{"input": "a", "image": "a.png"}]', '[\n{"input": "a",\n"image": ["a.png"]\n}\n]'):
        array.write_text(text)
        assert prompts.image_files(array) == {"a.png": 1}
    table = tmp_path / "rows.csv"
    table.write_text("input,image\nWhat is it?,a.png\nHello,\n")
    assert prompts.image_files(table) == {"a.png": 1}
    (tmp_path / "a.png").write_bytes(images.png(8, 8, 0))
    assert [each.images for each in prompts.read_prompts(table)] == [1, 0]


def test_cells_of_a_csv_file_may_be_empty_and_numbers(tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    table.write_text("id,input,output,stop_words,max_tokens\na,Hello,,,\nb,Bye,now,x,8\n")
    assert prompts.read_prompts(table) == (Prompt("a", "Hello"), Prompt("b", "Bye", 8, ("now",), ("x",)))
    table.write_text("input,max_tokens\nHello,\nHello,many\n")
    with pytest.raises(MatrixError, match="row 2: max_tokens: expected a positive integer, got 'many'"):
        prompts.read_prompts(table)


def test_a_prompt_file_that_cannot_be_read_names_no_images(tmp_path: Path) -> None:
    path = tmp_path / "deep.jsonl"
    path.write_text('{"image": ' + "[" * 5000)
    assert prompts.image_files(path) == {}
    os.mkfifo(tmp_path / "fifo")
    assert prompts.image_files(tmp_path / "fifo") == {}
    (tmp_path / "rows.jsonl").write_text('{"input": "a", "image": "fifo"}\n')
    with pytest.raises(MatrixError, match="is not a file"):
        prompts.read_prompts(tmp_path / "rows.jsonl")


GOOD = '{"input": "a", "output": "b"}\n'


@pytest.mark.parametrize(
    ("stage", "name", "content", "said"),
    [
        (PERF, "rows.jsonl", f'{GOOD}\n{{"text": "a"}}\n', "rows.jsonl:3: input: expected exactly one of"),
        (PERF, "rows.jsonl", "", "no prompt in this file"),
        (PERF, "rows.jsonl", f"{GOOD}plain text\n", "rows.jsonl:2: not JSON"),
        (PERF, "rows.json", '[{"input": "a"}, {"input": 5}]', "rows.json: row 2: input: expected a text"),
        (PERF, "rows.csv", "prompt\na\n", "row 1: input: expected exactly one of"),
        (PERF, "rows.jsonl", '{"input": "a", "image": 5}\n', "rows.jsonl:1: image: expected a text"),
        (PERF, "rows.jsonl", GOOD * 40_000 + "far behind", None),
        (PERF, "rows.json", f"[{','.join([GOOD] * 40_000)}]", None),
        (PERF, "rows.jsonl", '{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}', None),
        (ACCURACY, "rows.jsonl", f'{GOOD}{{"input": "a"}}\n', "rows.jsonl:2: output"),
        (ACCURACY, "rows.jsonl", '{"input": "a", "output": "b", "metric": "rouge"}', "unknown metric 'rouge'"),
        (ACCURACY, "rows.jsonl", GOOD, None),
        (SCORE, "rows.jsonl", '{"input": "a"}\n', None),
        (SCORE, "rows.jsonl", '{"input": "a", "choices": 5}\n', "rows.jsonl:1: choices: expected a list"),
    ],
)
def test_rows_that_cannot_be_read_are_found_by_the_plan(
    tmp_path: Path, stage: Stage, name: str, content: str, said: str | None
) -> None:
    """Otherwise the stage would find them after hours of building. Errors that need the model or a whole large file are left to it."""
    (tmp_path / name).write_text(content, encoding="utf-8")
    params = PerfParams() if stage is PERF else stage.params(metrics=("exact", "own:polite"))
    expected = nullcontext() if said is None else pytest.raises(MatrixError, match=re.escape(said))
    with expected:
        assert stage.settle(params, {"input_data": str(tmp_path / name)}, Machine(cpus=1, cpu="any")) == params


def test_a_warm_up_with_images_shares_no_beginning() -> None:
    prompt = prompts.with_images(prompts.Prompt("a", "What is it?"), ["data:1"])
    warm = warmup_prompt(prompt)
    assert warm.messages[0]["content"] == [{"type": "text", "text": " is it?"}, prompt.messages[0]["content"][1]]
    assert warm.id != prompt.id
