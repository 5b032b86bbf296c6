"""The command lines of known servers, against what their documentation says that they take (tests/data/openai_servers.json)."""

from __future__ import annotations

import itertools
import shlex
from pathlib import Path

import pytest

from tests.helpers.openai_cells import H100S, PORTS, cell, started
from tests.helpers.trtllm_cells import RECIPE
from tests.standins import openai_server
from trtllm_pipeline.tensorrt.others import command
from trtllm_pipeline.tensorrt.others.server import argv
from trtllm_pipeline.tensorrt.stage.params import OPENAI_SERVERS
from trtllm_pipeline.tensorrt.toolchains import catalog as toolchains


def test_every_known_server_is_recorded() -> None:
    assert (*openai_server.RECORD,) == OPENAI_SERVERS == (*command.KNOWN,)


@pytest.mark.parametrize("name", OPENAI_SERVERS)
def test_each_command_line_is_taken(name: str) -> None:
    parser, toolchain, taken = openai_server.parser(name), toolchains.load(name), 0
    for precision, tp, pp in itertools.product(command.KNOWN[name].precisions or ("fp16", "int8_wo"), (1, 2), (1, 2)):
        one = cell(name, precision, tp=tp, pp=pp)
        if toolchain.infeasible(one, H100S) is not None:
            continue
        asked = toolchain.stage("launch").read(one)
        words = argv(asked, {"model": Path("/m"), "checkpoint": Path("/c")}, "127.0.0.1", PORTS)
        assert words[0] == shlex.split(asked.command)[0]
        given = vars(parser.parse_args(words[1:]))
        assert given["port"] == 8000
        assert given.get("tensor_parallel_size", given.get("tp_size", tp)) == tp
        taken += 1
    assert taken >= 2


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_data_parallel_attention_is_taken(name: str) -> None:
    one = cell(name, tp=4, ep=4, dp=2, recipe={**RECIPE, "num_experts": 8})
    assert toolchains.load(name).infeasible(one, H100S) is None
    asked = toolchains.load(name).stage("launch").read(one)
    given = vars(openai_server.parser(name).parse_args(argv(asked, {"model": Path("/m")}, "127.0.0.1", PORTS)[1:]))
    assert given.get("data_parallel_size", given.get("dp_size")) == 2
    assert given.get("enable_expert_parallel") or given["ep_size"] == 4


@pytest.mark.parametrize(("name", "option"), [("vllm", "max_seqs"), ("sglang", "max_num_seqs")])
def test_an_option_that_is_not_theirs_is_refused(name: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = toolchains.load(name).stage("launch").read(cell(name, openai__options={option: 4}))
    with pytest.raises(SystemExit):
        openai_server.parser(name).parse_args(argv(asked, {"model": Path("/m")}, "127.0.0.1", PORTS)[1:])
    assert "unrecognized arguments" in capsys.readouterr().err


@pytest.mark.parametrize(("isl", "osl"), [(1024, 128), (128, 1)])
def test_the_context_of_sglang_has_room_for_what_it_leaves_free(isl: int, osl: int) -> None:
    words = started(cell("sglang", isl=isl, osl=osl), model="/m")
    context = int(words[words.index("--context-length") + 1])
    _, after_answer, after_prompt, _ = openai_server.LIMITS["sglang"]
    assert isl + osl <= context - after_answer
    assert isl <= context - after_prompt
    assert isl + osl + 1 > context - after_prompt, "the prompt that must be refused"
