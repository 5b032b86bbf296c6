"""The recorder of releases, on checkouts that are written here: in the ways that such sources define options, and whole.

No file of TensorRT-LLM is used. A whole checkout has the options that were recorded of a release, so that reading it has
to find no difference, and one where something was changed just that.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from maintenance import definitions, record_release
from maintenance.definitions import DefinitionsError
from tests.standins import releases, templates
from tests.standins.installation import install
from trtllm_pipeline.base.machine import probe
from trtllm_pipeline.tensorrt.trtllm import program_options

pytest.importorskip("click")

RELEASE = "1.0.0"
BUILD = """
    import argparse
    import os
    from importlib.machinery import SourceFileLoader
    import torch  # not installed
    from ..builder import Limits
    from ..extras import add_extra_arguments
    from .._missing import names_of

    open("RAN", "w").close()
    launch_missiles()
    LEVELS = ["quiet", "loud"]
    WORDS = dict(zip(LEVELS, range(2)))

    def enum_type(cls):
        return lambda text: cls(text)

    def parse_arguments():
        limits = Limits()
        parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        parser.add_argument('--source_dir', '-s', type=str, default=None, required=True, help="100% needed")
        parser.add_argument('--most', type=int, default=limits.most)
        parser.add_argument('--longest', type=int, default=torch.cuda.longest())
        group = parser.add_argument_group("output")
        group.add_argument('--level', choices=list(WORDS), default=LEVELS[-1])
        group.add_argument('--mode', type=enum_type(Limits), default=os.environ.get('MODE'))
        group.add_argument('--fast', default=False, action='store_true')
        group.add_argument('--slow', default=True, action='store_false')
        group.add_argument('--check', action=argparse.BooleanOptionalAction, default=False)
        group.add_argument('--hidden', type=float, default=argparse.SUPPRESS)
        group.add_argument('--many', nargs='+', type=int, default=[1, 2])
        for name in names_of(torch):
            group.add_argument(f'--{name}')
        add_extra_arguments(parser)
        args = parser.parse_args()
        raise SystemExit("never reached")
"""
EXTRAS = """
    from dataclasses import dataclass, field, fields
    from typing import Literal, Optional

    _SHOWN = ["gemm", "context"]

    class Meta(type):
        def __new__(cls, name, bases, attributes):
            return super().__new__(cls, name, bases, attributes)

    @dataclass
    class Extras(metaclass=Meta):
        _gemm: Optional[str] = field(default="auto", metadata={"choices": ["auto", "float16", "disable"]})
        _context: bool = True
        _internal: bool = False

    def add_extra_arguments(parser):
        for each in fields(Extras()):
            name = each.name.lstrip("_")
            if name not in _SHOWN:
                continue
            if each.type in (bool, "bool"):
                parser.add_argument("--" + name, type=str, default="enable" if each.default else "disable",
                                    choices=["enable", "disable"])
            else:
                parser.add_argument("--" + name, type=str, default=each.default, choices=each.metadata["choices"])
        return parser
"""
SERVE = """
    from __future__ import annotations
    import click
    import tensorrt_llm._torch as engine
    from .words import PairType

    class WithDefault(click.Group):
        def get_command(self, ctx, name):
            return super().get_command(ctx, name) or self.commands["serve"]

    def shared(function):
        return click.option("--port", type=int, default=8000, show_default=True)(function)

    @click.command("serve")
    @click.argument("model", type=str)
    @shared
    @click.option("--backend", type=click.Choice(["pytorch", "tensorrt"]), default="pytorch")
    @click.option("--config", "--extra_options", "config", type=PairType(), default=None)
    @click.option("--tp_size", type=click.IntRange(min=1), default=1)
    @click.option("--share", type=float, default=engine.SHARE)
    @click.option("--trust", is_flag=True, default=False)
    @click.option("--telemetry/--no-telemetry", default=True)
    @click.option("--folders", type=str, multiple=True)
    @click.option("--name", type=str, required=True)
    def serve(model: engine.Model, **options: engine.Any):
        raise SystemExit("never run")

    @click.command("other")
    @click.option("--file", "-f", type=str)
    def other(file): ...

    main = WithDefault(commands={"serve": serve, "other": other})
    if __name__ == "__main__":
        main()
"""


def written(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return root


def test_every_way_of_defining_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    root = written(
        tmp_path / "source",
        {
            "tensorrt_llm/commands/build.py": BUILD,
            "tensorrt_llm/builder.py": "import torch\n\nclass Limits(torch.nn.Module):\n    most = 7\n    torch.cuda.init()\n",
            "tensorrt_llm/extras/__init__.py": "from .plugin import *\nfrom .plugin import add_extra_arguments\n",
            "tensorrt_llm/extras/plugin.py": EXTRAS,
        },
    )
    found = definitions.of_argparse(root / "tensorrt_llm/commands/build.py", root)
    assert found == {
        "--check": {"takes_value": False, "type": "bool"},
        "--context": {"takes_value": True, "type": "enum", "choices": ["enable", "disable"], "default": "enable"},
        "--fast": {"takes_value": False, "type": "bool"},
        "--gemm": {"takes_value": True, "type": "enum", "choices": ["auto", "float16", "disable"], "default": "auto"},
        "--hidden": {"takes_value": True, "type": "float", "default": "<suppressed>"},
        "--level": {"takes_value": True, "type": "enum", "choices": ["quiet", "loud"], "default": "loud"},
        "--longest": {"takes_value": True, "type": "int"},
        "--many": {"takes_value": True, "type": "int", "default": [1, 2], "nargs": "+"},
        "--mode": {"takes_value": True, "type": "str"},
        "--most": {"takes_value": True, "type": "int", "default": 7},
        "--slow": {"takes_value": False, "type": "bool", "default": True},
        "--source_dir": {"takes_value": True, "aliases": ["-s"], "type": "str", "required": True},
    }
    assert not (tmp_path / "RAN").exists()


def test_nothing_that_a_function_does_beside_defining_options_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is imported or opened in the function that makes the parser is a stub, too."""
    monkeypatch.chdir(tmp_path)
    lines = """
        import argparse
        def parse_arguments():
            import os, torch.cuda
            from .extras import LONGEST
            from ..missing import names
            os.mkdir("RAN")
            made = open("RAN", "w")
            parser = argparse.ArgumentParser()
            parser.add_argument("--longest", type=int, default=LONGEST)
            parser.add_argument("--size", type=int, default=torch.cuda.size())
            return parser
    """
    root = written(tmp_path / "source", {"a/build.py": lines, "a/extras.py": "import torch\nLONGEST = 7\n"})
    assert definitions.of_argparse(root / "a/build.py", root) == {
        "--longest": {"takes_value": True, "type": "int", "default": 7},
        "--size": {"takes_value": True, "type": "int"},
    }
    assert not (tmp_path / "RAN").exists()


def test_click_programs_with_and_without_subcommands(tmp_path: Path) -> None:
    root = written(
        tmp_path,
        {"a/serve.py": SERVE, "a/words.py": "import click\nclass PairType(click.ParamType):\n    name = 'pair'\n"},
    )
    found = definitions.of_click(root / "a/serve.py", root)
    assert found["other"] == {"--file": {"takes_value": True, "aliases": ["-f"], "type": "str"}}
    assert found["serve"] == {
        "--backend": {"takes_value": True, "type": "enum", "choices": ["pytorch", "tensorrt"], "default": "pytorch"},
        "--config": {"takes_value": True, "aliases": ["--extra_options"], "type": "str"},
        "--folders": {"takes_value": True, "type": "str", "multiple": True},
        "--name": {"takes_value": True, "type": "str", "required": True},
        "--port": {"takes_value": True, "type": "int", "default": 8000},
        "--share": {"takes_value": True, "type": "float"},
        "--telemetry": {"takes_value": False, "type": "bool", "negative_flag": "--no-telemetry", "default": True},
        "--tp_size": {"takes_value": True, "type": "int", "default": 1},
        "--trust": {"takes_value": False, "type": "bool"},
    }
    single = SERVE.replace("main = WithDefault", "commands = dict").replace("        main()", "        serve()")
    alone = written(tmp_path / "b", {"serve.py": single.partition('    @click.command("other")')[0]})
    assert definitions.of_click(alone / "serve.py", alone)[""].keys() == found["serve"].keys()


def test_a_file_without_options_is_told(tmp_path: Path) -> None:
    root = written(tmp_path, {"a.py": "import argparse\nX = 1\n"})
    with pytest.raises(DefinitionsError, match="no parser is made"):
        definitions.of_argparse(root / "a.py", root)
    with pytest.raises(DefinitionsError, match="no click command"):
        definitions.of_click(root / "a.py", root)


@pytest.mark.parametrize("text", [b"\xff\xfe", b"def (", b"x = '\0'", b"x = " + b"(" * 5000 + b")" * 5000])
def test_what_is_no_python_is_told(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "tensorrt_llm" / "commands" / "build.py"
    file.parent.mkdir(parents=True)
    file.write_bytes(text)
    with pytest.raises(SystemExit, match=r"nothing was read\n  trtllm-build: .*build.py: cannot be parsed"):
        record_release.main(["1.3.0", "--source", str(tmp_path)])


def test_a_record_that_is_not_there_is_told_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["1.3.0", "--source", str(tmp_path), "--write", "--record", str(tmp_path / "none.json")]
    with pytest.raises(SystemExit):
        record_release.main(words)
    assert "none.json is not there" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------ whole checkouts


def _call(name: str, option: Mapping[str, Any]) -> str:
    """The add_argument of a recorded option."""
    given: dict[str, Any] = {}
    if not option["takes_value"]:
        given["action"] = "store_false" if option.get("default") is True else "store_true"
    else:
        given |= {key: option[key] for key in ("choices", "nargs", "action") if key in option}
        given |= {"default": option["default"]} if option.get("default", "<suppressed>") != "<suppressed>" else {}
    given |= {"required": True} if option.get("required") else {}
    words = [repr(each) for each in (name, *option.get("aliases", ()))]
    words += [f"{key}={value!r}" for key, value in given.items()]
    kind = option["type"] if option["takes_value"] and option["type"] in {"int", "float"} else None
    words += [f"type={kind}"] if kind else []
    words += ["default=argparse.SUPPRESS"] if option.get("default") == "<suppressed>" else []
    return f"    parser.add_argument({', '.join(words)})"


def _script(table: Mapping[str, Any], *, guard: bool = False) -> str:
    lines = [_call(name, option) for name, option in table.items()]
    begin = 'if __name__ == "__main__":' if guard else "def parse_arguments(args=None):"
    end = "    args = parser.parse_args()" if guard else "    return parser.parse_args(args)"
    return "\n".join(
        ["import argparse", "import tensorrt_llm", begin, "    parser = argparse.ArgumentParser()", *lines, end, ""]
    )


def _click_script(table: Mapping[str, Any]) -> str:
    lines = []
    for name, option in table.items():
        given = {"default": option["default"]} if "default" in option else {}
        words = [repr(each) for each in (name, *option.get("aliases", ()))]
        if not option["takes_value"]:
            words.append("is_flag=True")
        elif option.get("choices"):
            words.append(f"type=click.Choice({option['choices']!r})")
        elif option["type"] in {"int", "float"}:
            words.append(f"type={option['type']}")
        words += [f"{key}={value!r}" for key, value in given.items()]
        words += ["multiple=True"] if option.get("multiple") else []
        words += ["required=True"] if option.get("required") else []
        lines.append(f"@click.option({', '.join(words)})")
    return "\n".join(
        [
            "import click",
            '@click.command("serve")',
            *lines,
            "def serve(**given): ...",
            'main = click.Group(commands={"serve": serve})',
            "",
        ]
    )


_FOLDER = {"convert_checkpoint.py:medusa": "", "convert_checkpoint.py:eagle": ""}
"""Converters that are no family's."""


@pytest.fixture
def checkout(tmp_path: Path) -> Callable[..., Path]:
    """Writes a checkout of the release; `change` is given the tables first."""

    def write(change: Callable[[dict[str, dict[str, Any]]], None] = lambda tables: None) -> Path:
        tables: dict[str, dict[str, Any]] = {}
        for tool in program_options.load():
            known = releases.table(tool, RELEASE)
            if known is None:
                continue
            tables[tool] = {
                name: dict(about) for name, about in (known.get("serve") or next(iter(known.values()))).items()
            }
        change(tables)
        places = {
            "trtllm-build": "tensorrt_llm/commands/build.py",
            "quantize.py": "examples/quantization/quantize.py",
            "run.py": "examples/run.py",
            **{
                tool: f"examples/{_FOLDER.get(tool, 'models/core/')}{tool.partition(':')[2]}/convert_checkpoint.py"
                for tool in tables
                if tool.startswith("convert")
            },
        }
        files = {path: _script(tables[tool], guard=tool == "quantize.py") for tool, path in places.items()}
        files["tensorrt_llm/commands/serve.py"] = _click_script(tables["trtllm-serve"])
        root = written(tmp_path / "checkout", files)
        (root / "triton_backend").mkdir(exist_ok=True)
        if not (root / "triton_backend/all_models").exists():
            templates.install(root / "triton_backend", RELEASE)
        return root

    return write


def test_a_checkout_of_a_recorded_release_has_no_differences(
    checkout: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "recorded.json"
    record.write_bytes(record_release.RECORDED.read_bytes())
    words = [RELEASE, "--source", str(checkout()), "--record", str(record)]
    assert record_release.main(words) == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    assert "0 differences" in said
    unread = [line.split(": ")[1] for line in said.splitlines() if "not read" in line]
    assert unread == ["convert_checkpoint.py:glm-4-9b"]  # recorded of later releases alone
    assert record.read_bytes() == record_release.RECORDED.read_bytes()
    assert record_release.main([*words, "--write"]) == 0
    first = record.read_bytes()
    assert record_release.main([*words, "--write"]) == 0
    assert record.read_bytes() == first
    before, after = json.loads(record_release.RECORDED.read_text()), json.loads(first)
    for tool, entries in after["tools"].items():
        new = [entry for entry in entries if entry not in before["tools"][tool]]
        assert len(new) == (0 if tool in {"launch_triton_server.py", *unread} else 1)
    (models,) = after["templates"]
    assert set(models["placeholders"]) == set(templates.MODELS)


def test_differences_are_told_with_the_form_to_add(
    checkout: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    def change(tables: dict[str, dict[str, Any]]) -> None:
        build = tables["trtllm-build"]
        build["--brand_new"] = {
            "takes_value": True,
            "type": "enum",
            "choices": ["enable", "disable"],
            "default": "disable",
        }
        build["--tokens_per_block"]["default"] = 128
        del build["--max_beam_width"]
        tables["trtllm-serve"]["--backend"]["choices"] = ["pytorch"]
        tables["run.py"]["--use_py_session"] = {"takes_value": True, "type": "int"}

    root = checkout(change)
    config = root / "triton_backend/all_models/inflight_batcher_llm/tensorrt_llm/config.pbtxt"
    config.write_text(config.read_text().replace("${max_beam_width}", "${widest_beam}"))
    assert record_release.main([RELEASE, "--source", str(root)]) == 1
    said = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert said == [
        'trtllm-build: --brand_new is missing in the table: {"since": "1.0.0", "type": "on_off", "default": "disable"}',
        "trtllm-build: --tokens_per_block is 128 by default, in the table 32",
        'trtllm-build: --max_beam_width is only in the table: {"since": "1.0.0", "gone": ""}',
        "trtllm-serve: --backend is one of ['pytorch'], in the table ('pytorch', 'trt')",
        "run.py: --use_py_session takes a value: True, in the table False",
        "templates: ${widest_beam} is missing in repository_settings.py",
        "templates: ${max_beam_width} is only in repository_settings.py",
    ]


def test_a_folder_that_is_no_checkout_and_a_word_that_is_no_release(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="is no checkout"):
        record_release.main([RELEASE, "--source", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        record_release.main(["new", "--source", str(tmp_path)])
    assert ended.value.code == 2


@pytest.mark.thorough
def test_an_installation_is_read_by_its_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = install(tmp_path / "trt", RELEASE, gpus=1, templates=templates.install(tmp_path / "t", RELEASE))
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(tmp_path / "trt/site-packages"))
    # A survey that another test left knows nothing of the installation, and this one's must not be left either.
    monkeypatch.setattr(probe, "survey", probe.survey.__wrapped__)
    assert record_release.main([RELEASE, "--installed"]) == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    assert "trtllm-build: 70 options" in said
    assert "0 differences" in said


def schema(**changed: Any) -> dict[str, Any]:
    """A JSON schema of three names, with others."""
    cache = {"properties": {"dtype": {"enum": ["auto", "fp8"]}}, "additionalProperties": False}
    names = {"model": {"type": "string"}, "cache": {"$ref": "#/$defs/Cache"}, **changed}
    return {"$defs": {"Cache": cache}, "properties": names}


def test_a_schema_is_recorded_and_compared_with_the_release_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, file = tmp_path / "llm_args.json", tmp_path / "schema.json"
    record.write_text('{"about": ["one", "two"], "schemas": []}', encoding="utf-8")

    def recorded(release: str, document: Any, *more: str) -> tuple[int, list[str]]:
        file.write_text(json.dumps(document), encoding="utf-8")
        code = record_release.main([release, "--schema", str(file), "--record", str(record), *more])
        return code, [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]

    names = ["new: Cache.dtype", "new: cache", "new: model"]
    assert recorded("1.4.0rc2", schema(), "--label", "a commit", "--write") == (1, names)
    assert recorded("1.4.0rc3", schema()) == (0, [])
    changed = schema(model={"type": ["string", "null"]}, size={"type": "integer"})
    assert recorded("1.4.0rc3", changed, "--write") == (
        1,
        ["new: size", "changed: model is of type string or null, was of type string"],
    )
    assert recorded("1.4.0rc1", schema(), "--write") == (1, names)
    document = json.loads(record.read_text(encoding="utf-8"))
    assert document["about"] == ["one", "two"]
    assert [row["release"] for row in document["schemas"]] == ["1.4.0rc1", "1.4.0rc2", "1.4.0rc3"]
    assert document["schemas"][1]["source"] == "a commit"
    assert document["schemas"][1]["classes"] == {
        "file": {"cache": "Cache", "model": "string"},
        "Cache": {"dtype": {"enum": ["auto", "fp8"]}},
    }
    with pytest.raises(SystemExit, match="is not a JSON schema of a YAML file"):
        recorded("1.4.0rc4", [])


def test_the_shipped_record_of_schemas_is_as_the_recorder_writes_it(tmp_path: Path) -> None:
    shipped = record_release.llm_args.RECORDED
    record = tmp_path / "llm_args.json"
    record.write_bytes(shipped.read_bytes())
    record_release.write_schemas(record, json.loads(shipped.read_text(encoding="utf-8"))["schemas"])
    assert record.read_bytes() == shipped.read_bytes()


def test_help_with_defaults() -> None:
    found = record_release.of_help(
        "usage: x [-h]\n\noptions:\n  -h, --help  show this\n  --level {a,b}, -l {a,b}\n                        How loud\n"
        "                        it is. (default: b)\n  --most MOST           (default: None)\n  --fast\n"
    )
    assert found == {
        "--fast": {"takes_value": False, "type": "bool"},
        "--level": {"takes_value": True, "aliases": ["-l"], "type": "enum", "choices": ["a", "b"], "default": "b"},
        "--most": {"takes_value": True, "type": "str"},
    }
