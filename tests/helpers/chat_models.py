"""A gateway in front of a scripted Triton: everything of it is real but the model, whose answers are written down."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.helpers.embedded_engines import byte_symbols
from tests.helpers.scripted_server import Script, ScriptedServer, config, running
from tests.helpers.waiting import eventually
from trtllm_pipeline.orchestrate.matrix.gateway_settings import GatewayParams
from trtllm_pipeline.serve.gateway.gateway_config import GatewayConfig, OfferedModel

TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\nTools:' }}
{%- for tool in tools %}{{ '\\n' + tool.function | tojson }}{% endfor %}
{{- '\\nCall one with <tool_call>.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n' }}{{ call.function | tojson }}{{ '\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""As models of the Hermes family have it, in short."""
LOG = "gateway.log"
_SAID = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)


class Running(NamedTuple):
    """Where clients find the gateway, and what stands behind it."""

    url: str
    triton: ScriptedServer
    process: subprocess.Popen[str]


def said(prompt: str) -> list[tuple[str, str]]:
    """Role and text of each message in a prompt that `TEMPLATE` wrote."""
    return _SAID.findall(prompt)


def spoken(text: str, *, gap_s: float = 0.0, size: int = 3) -> Script:
    """`text` in pieces of a few characters, each counted as one token."""
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    return Script(tuple((at * gap_s, part) for at, part in enumerate(parts)), counts=(1,) * len(parts))


def write_model(folder: Path, template: str = TEMPLATE, special: Sequence[str] = ()) -> Path:
    """A model's directory: a token is a byte, or one of `special`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {symbol: number for number, symbol in enumerate(byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": "scripted"}), encoding="utf-8")
    return folder


def guided_config(name: str) -> Any:
    """A Triton model that follows a JSON schema."""
    message = config(name, counts=True)
    for tensor in ("guided_decoding_guide_type", "guided_decoding_guide"):
        message.input.add(name=tensor, data_type="TYPE_STRING", dims=[1], optional=True)
    return message


@contextmanager
def gateway(
    folder: Path,
    respond: Callable[[str, Mapping[str, Any]], Script],
    *,
    model: str = "scripted",
    guided: bool = False,
    passing: bool = False,
    template: str = TEMPLATE,
    special: Sequence[str] = (),
    others: Sequence[Any] = (),
    served_model: str | None = None,
    api_keys_file: Path | None = None,
    **params: Any,
) -> Iterator[Running]:
    """A gateway process whose model `respond` speaks for. `others` are the configurations of models beside it, of which `served_model` may be
    asked instead.

    `passing`: it is an OpenAI-compatible server that is behind the gateway.
    """
    triton_model = guided_config("ensemble") if guided else config("ensemble", counts=True)
    with running(respond, {"ensemble": triton_model, **{each.name: each for each in others}}) as (triton, service):
        path = folder / "service.json"
        path.write_text(json.dumps(service), encoding="utf-8")
        tokenizer = write_model(folder / "model", template, special)
        served = OfferedModel(
            name=model, service=path, server_model=served_model, model_folder=tokenizer, max_seq_len=20_000
        )
        if passing:
            served = OfferedModel(name=model, url=f"http://{service['http']}/v1", server_model="ensemble")
        GatewayConfig(models=(served,), api_keys_file=api_keys_file, params=GatewayParams(**params)).write(
            folder / "config.json"
        )
        with (folder / LOG).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "trtllm_pipeline.serve.gateway", str(folder / "config.json")],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        try:
            yield Running(_url(folder / "gateway.json", process), triton, process)
        finally:
            process.terminate()
            assert process.wait(60) == 0
            assert process.stdout is not None
            process.stdout.close()


def _url(path: Path, process: subprocess.Popen[str]) -> str:
    assert eventually(lambda: path.exists() or process.poll() is not None), "the gateway does not listen"
    assert process.poll() is None, f"the gateway ended with {process.returncode}"
    url: str = json.loads(path.read_text(encoding="utf-8"))["url"]
    return url.rstrip("/") + "/v1"
