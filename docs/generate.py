"""Writes the parts of the documentation that follow from the code: commands, settings, JSON keys, rules.

    python docs/generate.py

`PAGES` are generated whole. In other pages, a table is between `<!-- generated: KIND NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import json_schemas
import screens
from typer.main import get_command

from trtllm_pipeline.base.domain import Cell, CellId
from trtllm_pipeline.base.machine import assume
from trtllm_pipeline.base.machine.model import Machine
from trtllm_pipeline.measure.load.validity import GATES
from trtllm_pipeline.models.triton_repository.lint import RULES
from trtllm_pipeline.orchestrate.matrix.matrices import summary
from trtllm_pipeline.orchestrate.matrix.models import PRECISIONS, Recipe, Settings, json_schema
from trtllm_pipeline.orchestrate.matrix.recipe_files import load_recipe, matrices_folder, recipes_folder
from trtllm_pipeline.show.cli import app
from trtllm_pipeline.show.cli.app import Command, commands
from trtllm_pipeline.show.cli.command_signatures import MATRIX_WORD
from trtllm_pipeline.tensorrt.diagnosis.signatures import GROUP, Weight, chosen, signatures
from trtllm_pipeline.tensorrt.stage.params import MOST_TOKENS
from trtllm_pipeline.tensorrt.toolchains import catalog as toolchains
from trtllm_pipeline.tensorrt.toolchains import model_shape
from trtllm_pipeline.tensorrt.trtllm.releases import FAMILIES, REQUIREMENTS
from trtllm_pipeline.tensorrt.trtllm.rules import RULES as REFUSALS
from trtllm_pipeline.tensorrt.trtllm.templates import FIXED, PLACEHOLDERS

FOLDER: Final = Path(__file__).parent
BLOCK: Final = re.compile(r"(<!-- generated: (\w+) ([\w -]*?) ?-->\n).*?(<!-- end -->)", re.DOTALL)
SHARED: Final = ("--help", "--matrix", "--cells", "--set", "--toolchain", "--workspace", "--assume", "--format")
"""Options that the head of commands.md explains."""
_EVERYWHERE: Final = ("timeout_s", "retries")
_OF_NO_STAGE: Final = frozenset(("quantize.calibration", "gateway", "openai", "cluster", "retry", "retry.oom", "cost"))
"""Settings sections whose own words say who reads them."""
_NOWHERE: Final = "—"
_BACKENDS: Final = {"tensorrt_llm": "engines", "tensorrt_llm_pytorch": "PyTorch"}
_RELEASES: Final = (
    *(f"0.{minor}.0" for minor in range(8, 22)),
    "1.0.0",
    "1.1.0",
    "1.2.0",
    "1.3.0rc20",
    "1.3.0rc29",
    "1.4.0rc1",
)
_COMPUTE_CAPABILITIES: Final = (75, 80, 86, 89, 90, 100, 103, 107, 120)
_GPUS: Final = {
    75: "T4",
    80: "A100",
    86: "A10",
    89: "L4, L40S",
    90: "H100, H200",
    100: "B200",
    103: "B300",
    120: "RTX PRO 6000 Blackwell",
}
_BOTH_BACKENDS: Final = "1.2.0"
"""The last final release with both."""
_WORTH_SHOWING: Final[Mapping[str, Sequence[tuple[int, int]]]] = {
    "llama-3.1-8b-instruct": ((1, 1), (2, 1)),
    "qwen2.5-7b-instruct": ((1, 1),),
    "phi-4": ((1, 1),),
    "mixtral-8x7b-instruct-v0.1": ((1, 1), (2, 1)),
    "llama-3.1-70b-instruct": ((2, 1), (4, 1), (8, 1)),
    "qwen2-72b-instruct": ((4, 1), (8, 1), (4, 2)),
}
"""Recipe -> layouts, tp and pp."""
_FILLED_BY: Final = {
    "triton_max_batch_size": "`settings.repository.triton_max_batch_size`, or else the axis `max_batch_size`",
    "engine_dir": "the engine's directory",
    "tokenizer_dir": "the model's directory",
}
_ONE_GPU: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 8),
    **dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 512),
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "family": "llama",
    "source": {"generated": "llama"},
}
"""A model that every release converts and any GPU holds, so that nothing but precisions decides."""


def command_of(path: str) -> Any:
    """The Typer command of `pipeline PATH`, or the group."""
    command: Any = get_command(app.build(path.split()))
    for word in path.split():
        command = command.commands[word]
    return command


def options(name: str) -> Iterator[str]:
    """The table of a command's own options."""
    shared: list[str] = []
    rows = []
    command = command_of(name)
    context = command.context_class(command)
    for param in command.params:
        if param.hidden or param.name == MATRIX_WORD:
            continue
        is_option = param.param_type_name == "option"
        negated = param.secondary_opts if is_option and param.default is not False else []
        flags = [*param.opts, *negated] if is_option else [param.metavar or param.name.upper()]
        if param.opts[-1] in SHARED:
            shared.append(f"`{param.opts[-1]}`")
            continue
        flag = is_option and param.is_flag
        kind = param.metavar or param.display_type(context)
        if "|" in kind:
            kind = "{" + kind.strip("<>").replace("|", ",") + "}"
        value = "" if flag or not is_option else f" {kind}"
        what = (param.help or "") + _default(param, context)
        rows.append(f"| `{', '.join(flags)}{value}` | {_line(what)} |")
    if rows:
        yield from ("| option | meaning |", "|---|---|", *rows)
    if shared:
        yield from (["", f"And {', '.join(shared)}."] if rows else [f"Options: {', '.join(shared)}."])


def _default(param: Any, context: Any) -> str:
    """The default as a user types it."""
    if param.default is None or param.default is False or param.default == "" or not param.show_default:
        return ""
    shown = param._get_default_string(ctx=context, show_default_is_str=False, default_value=param.default)  # noqa: SLF001
    return f" (default {shown})"


class _Read(dict[str, Any]):
    """A mapping that remembers which of its keys were read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)


@cache
def _schema(kind: str) -> dict[str, Any]:
    """The JSON Schema of matrices or recipes."""
    return json_schema(kind)


@cache
def read_by(toolchain: str) -> frozenset[str]:
    """`SECTION.KEY` of each setting that some stage of a toolchain reads, found by reading its stages."""
    sections = {name: _Read(values) for name, values in Settings().model_dump(mode="json").items()}
    recipe: dict[str, Any] = {"source": {"generated": "llama"}}
    found = toolchains.load(toolchain)
    for precision in ("fp16", "int4_awq"):
        cell = Cell(CellId("x"), "x", toolchain, precision, 1, 1, 1, 1, 1, recipe, sections)
        machine = Machine(cpus=1, cpu="")
        found.infeasible(cell, machine)
        for stage in found.stages:
            for ask in (stage.read, stage.files):
                ask(cell)
            stage.applies(cell, machine)
            stage.resources(cell, machine)
    return frozenset(f"{name}.{key}" for name, section in sections.items() for key in (*section.read, *_EVERYWHERE))


def settings(section: str, definition: Mapping[str, Any]) -> Iterator[str]:
    """The table of one settings section, or of a mapping in one."""
    used = read_by("embedded")
    yield "| key | values | default | meaning |"
    yield "|---|---|---|---|"
    for key, field in definition["properties"].items():
        if "$ref" in field and field["$ref"].endswith("/Calibration"):
            continue  # a table of its own
        what = field.get("description", "")
        if section not in _OF_NO_STAGE and f"{section}.{key}" not in used:
            what += " The embedded toolchain does not read it."
        default = json.dumps(field.get("default"), ensure_ascii=False)
        yield f"| `{key}` | {values(field)} | `{default}` | {_line(what)} |"


def fields(name: str) -> Iterator[str]:
    """The table of an object of the schemas: its keys, whether they are required, and their meaning."""
    kind = "recipe" if name in {"Recipe", "RecipeSmoke"} or name.endswith("Source") else "matrix"
    schema = _schema("recipe" if kind == "recipe" else "matrix")
    definition = schema if name in {"Recipe", "Matrix"} else schema["$defs"][name]
    required = definition.get("required", ())
    yield "| key | values | default | meaning |"
    yield "|---|---|---|---|"
    for key, field in definition["properties"].items():
        default = "required" if key in required else f"`{json.dumps(field.get('default'), ensure_ascii=False)}`"
        if field.get("default") == [] or "$ref" in field:
            default = "required" if key in required else ""
        yield f"| `{key}` | {values(field)} | {default} | {_line(field.get('description', ''))} |"


def gates(_name: str) -> Iterator[str]:
    """The table of the validity gate."""
    yield "| check | looks at | fails if | because |"
    yield "|---|---|---|---|"
    for gate in GATES:
        yield f"| `{gate.id}` | {_line(gate.what)} | {_line(gate.limit)} | {_line(gate.why)} |"


def values(field: Mapping[str, Any]) -> str:
    """The accepted values of a field of a JSON Schema."""
    if "enum" in field:
        return ", ".join(f"`{each}`" for each in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    if "anyOf" in field or "oneOf" in field:
        parts = [values(part) for part in field.get("anyOf", field.get("oneOf", ()))]
        return " or ".join(dict.fromkeys(parts))
    if "$ref" in field:
        return "a mapping, see below"
    match field.get("type"):
        case "array":
            return f"list of: {values(field['items'])}"
        case "integer" | "number" as number:
            least, above = field.get("minimum"), field.get("exclusiveMinimum")
            most = field.get("maximum")
            words: str = number
            words += f" from {least:g}" if least is not None else f" above {above:g}" if above is not None else ""
            return words + (f" to {most:.10g}" if most is not None and most <= MOST_TOKENS else "")
        case "boolean":
            return "`true`, `false`"
        case "null":
            return "`null`"
        case "object":
            return "a mapping"
        case _:
            if field.get("examples"):
                return "text, e.g. " + ", ".join(f"`{each}`" for each in field["examples"])
            return "text"


def _line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def rules(_name: str) -> Iterator[str]:
    """The table of the repository linter's rules."""
    yield "| rule | name | severity | finds | what to do |"
    yield "|---|---|---|---|---|"
    for rule in RULES:
        yield f"| `{rule.id}` | {rule.name} | {rule.severity} | {_line(rule.what)} | {_line(rule.hint)} |"


def precisions(_name: str) -> Iterator[str]:
    """The GPUs on which each precision works, by backend and release, from the toolchains' own checks.

    Neighbouring releases with the same answers share a column.
    """
    caches = [("fp16", "fp8"), ("fp16", "int8")]
    rows = [(precision, None) for precision in PRECISIONS] + caches
    columns = []
    for backend, name in _BACKENDS.items():
        answers: dict[str, tuple[str, ...]] = {}
        for release in _RELEASES:
            answers[release] = tuple(_works_on(backend, release, precision, kv) for precision, kv in rows)
        same = [list(group) for _, group in itertools.groupby(_RELEASES, answers.__getitem__)]
        columns += [
            (f"{name} {_span([each.removesuffix('.0') for each in group])}", answers[group[0]])
            for group in same
            if set(answers[group[0]]) != {_NOWHERE}
        ]
    yield "| precision | " + " | ".join(head for head, _ in columns) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    for number, (precision, kv) in enumerate(rows):
        head = f"`{precision}`" if kv is None else f"{kv.upper()} KV cache"
        yield f"| {head} | " + " | ".join(cells[number] for _, cells in columns) + " |"


def requirements(_name: str) -> Iterator[str]:
    """What releases need, as far as it was read."""
    yield "| releases | transformers | torch | CUDA | source |"
    yield "|---|---|---|---|---|"
    for row in REQUIREMENTS:
        last = f"before {row.before.removesuffix('.dev0')}"
        yield f"| {row.since} on, {last} | {row.transformers} | {row.torch} | {row.cuda} | {row.source} |"


def gpus(_name: str) -> Iterator[str]:
    """The precisions of each GPU generation with a release that has both backends, from the toolchains' own checks.

    Neighbouring generations with the same answers share a column.
    """
    rows = [(precision, None) for precision in PRECISIONS if precision != "fp32"] + [("fp16", "fp8"), ("fp16", "int8")]
    answers = {sm: tuple(_backends_for(sm, precision, kv) for precision, kv in rows) for sm in _GPUS}
    columns = [list(group) for _, group in itertools.groupby(_GPUS, answers.__getitem__)]
    heads = [f"{', '.join(_GPUS[sm] for sm in group)} (SM {_span(group)})" for group in columns]
    yield f"| | {' | '.join(heads)} |"
    yield "|---" * (len(columns) + 1) + "|"
    for number, (precision, kv) in enumerate(rows):
        head = f"`{precision}`" if kv is None else f"{kv.upper()} KV cache"
        yield f"| {head} | {' | '.join(answers[group[0]][number] for group in columns)} |"


def _backends_for(sm: int, precision: str, kv: str | None) -> str:
    """The backends that accept this on a GPU, in words."""
    works = [name for backend, name in _BACKENDS.items() if _works(backend, _BOTH_BACKENDS, sm, precision, kv)]
    return "both" if len(works) == len(_BACKENDS) else ", ".join(works) or _NOWHERE


def weights(_name: str) -> Iterator[str]:
    """Weights in GiB and KV cache in KiB a token, of each GPU, by model and layout: the arithmetic of a plan."""
    shown = ("fp16", "fp8", "int4_awq")
    yield f"| model | layout | {' | '.join(f'`{precision}`' for precision in shown)} | 16-bit cache | 8-bit cache |"
    yield "|---|---|" + "---:|" * (len(shown) + 2)
    for model, layouts in _WORTH_SHOWING.items():
        shape = model_shape.Shape.of(load_recipe(recipes_folder() / f"{model}.yaml").model_dump(mode="json"))
        for tp, pp in layouts:
            gib = [f"{model_shape.weights_bytes(shape, precision, tp, pp) / 2**30:.1f}" for precision in shown]
            kib = [f"{model_shape.kv_bytes_per_token(shape, size, tp, pp) / 2**10:g}" for size in (2, 1)]
            yield f"| {model} | {_layout(tp, pp)} | {' | '.join([*gib, *kib])} |"


def _layout(tp: int, pp: int) -> str:
    return f"tp{tp}" + (f"pp{pp}" if pp > 1 else "")


def output(name: str) -> Iterator[str]:
    """The table of one of `docs/schemas`: every key of a JSON output, with its type."""
    schema = json.loads((FOLDER / "schemas" / f"{name}.json").read_text(encoding="utf-8"))
    yield "| key | type | present |"
    yield "|---|---|---|"
    for path, part, required in _keys(schema):
        yield f"| `{path}` | {_type(part)} | {'always' if required else 'sometimes'} |"


def _keys(schema: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Mapping[str, Any], bool]]:
    """Path, schema and whether it is required, for every key below a schema."""
    if "items" in schema:
        yield from _keys(schema["items"], f"{path}[]")
    for name, part in schema.get("properties", {}).items():
        inner = f"{path}.{name}".lstrip(".")
        yield inner, part, name in schema.get("required", ())
        yield from _keys(part, inner)


def _type(schema: Mapping[str, Any]) -> str:
    """The type of an output key, in words."""
    if "const" in schema:
        return f"`{schema['const']}`"
    if "anyOf" in schema:
        return " or ".join(_type(part) for part in schema["anyOf"])
    if "$ref" in schema:
        return "statistics"
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    words = []
    for kind in kinds:
        if kind == "object" and "properties" not in schema:
            words.append("object with names as keys")
        elif kind == "array" and "type" in schema.get("items", {}) and "properties" not in schema["items"]:
            words.append(f"list of: {_type(schema['items'])}")
        else:
            words.append({"array": "list", "string": "text", "null": "`null`"}.get(kind, kind))
    return " or ".join(words)


def recipes(_name: str) -> Iterator[str]:
    """The table of shipped recipes."""
    yield "| recipe | model | parameters | engines | PyTorch | license |"
    yield "|---|---|---:|---|---|---|"
    for path in sorted(recipes_folder().glob("*.yaml")):
        recipe = load_recipe(path)
        spans = [_releases(recipe, backend) for backend in _BACKENDS]
        size = "" if recipe.parameters is None else f"{recipe.parameters / 1e9:.2g} B"
        yield f"| `{recipe.name}` | {_line(recipe.summary)} | {size} | {' | '.join(spans)} | {_line(recipe.license)} |"


def _releases(recipe: Recipe, backend: str) -> str:
    """The releases of a backend that have a recipe's model, if the recipe lists them."""
    precisions = recipe.precisions
    if isinstance(precisions, Mapping) and not precisions.get(backend, ("unknown",)):
        return _NOWHERE
    return f"`{recipe.releases[backend]}`" if backend in recipe.releases else ""


def matrices(_name: str) -> Iterator[str]:
    """The table of shipped matrices."""
    yield "| matrix | what it measures |"
    yield "|---|---|"
    for path in sorted(matrices_folder().glob("*.yaml")):
        yield f"| [`{path.stem}`](../../matrices/{path.name}) | {_line(summary(path))} |"


def placeholders(_name: str) -> Iterator[str]:
    """The placeholders of Triton's templates that have another name in a matrix, or that users do not set."""
    yield "| placeholder | here |"
    yield "|---|---|"
    for setting, placeholder in PLACEHOLDERS.items():
        if setting != placeholder:
            yield f"| `{placeholder}` | `settings.repository.{setting}` |"
    for placeholder in FIXED:
        yield f"| `{placeholder}` | {_FILLED_BY[placeholder]} |"


def _works_on(backend: str, release: str, precision: str, kv: str | None) -> str:
    """The compute capabilities on which a toolchain accepts this, in words."""
    works = [_works(backend, release, sm, precision, kv) for sm in _COMPUTE_CAPABILITIES]
    runs = itertools.groupby(zip(works, _COMPUTE_CAPABILITIES, strict=True), lambda pair: pair[0])
    return ", ".join(_span([sm for _, sm in run]) for works_here, run in runs if works_here) or _NOWHERE


def _works(backend: str, release: str, sm: int, precision: str, kv: str | None) -> bool:
    """True if a toolchain accepts this on one GPU."""
    sections = Settings().model_dump(mode="json")
    sections["quantize"]["kv_cache_precision"] = kv
    cell = Cell(CellId("x"), "x", backend, precision, 1, 1, 1, 128, 128, _ONE_GPU, sections)
    toolchain = toolchains.load(backend)
    machine = assume.parse(f"tensorrt_llm=={release},sm={sm},gpus=1,gpu_memory_gib=80")
    return toolchain.missing(machine) is None and toolchain.infeasible(cell, machine) is None


def _span(values: Sequence[object]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"


def refusals(_name: str) -> Iterator[str]:
    """The table of combinations that TensorRT-LLM refuses after its options are parsed."""
    yield "| rule | name | backend | releases | severity | finds | source | what to do |"
    yield "|---|---|---|---|---|---|---|---|"
    for rule in REFUSALS:
        backend = ", ".join(_BACKENDS[each] for each in rule.toolchains)
        spans = [f"from {rule.since} on"] * bool(rule.since) + [f"before {rule.before}"] * bool(rule.before)
        cells = (
            rule.name,
            backend,
            ", ".join(spans) or "all",
            rule.severity,
            rule.what,
            rule.source,
            rule.hint or "see the finding",
        )
        yield f"| `{rule.id}` | {' | '.join(map(_line, cells))} |"


def families(_name: str) -> Iterator[str]:
    """The table of architecture families that become engines."""
    yield "| family | script | engines | tensor parallel | pipeline stages | whole experts |"
    yield "|---|---|---|---|---|---|"
    for name, family in FAMILIES.items():
        since = [family.since, max(family.since, family.tensor_parallel, key=_numbers)]
        stages = family.pipeline_parallel and max(family.since, family.pipeline_parallel, key=_numbers)
        words = [f"from {each}" if each else _NOWHERE for each in (*since, stages, family.expert_parallel)]
        yield f"| `{name}` | `{family.script}` | {' | '.join(words)} |"


def _numbers(release: str) -> list[int]:
    return [int(number) for number in release.split(".")]


def failures(_name: str) -> Iterator[str]:
    """The table of messages in logs that name a cause."""
    yield "| message in a log | cause | class | what to do |"
    yield "|---|---|---|---|"
    for signature in signatures():
        exact = [each for each in signature.met if re.search(signature.exact.pattern, each, re.MULTILINE)]
        likely = [each for each in signature.met if each not in exact]
        words = "; a hint alone: ".join(
            ", ".join(f"`{_line(each)}`" for each in part) for part in (exact, likely) if part
        )
        names = {Weight.SYMPTOM: "a symptom", Weight.CLASS: "a hint alone", Weight.WORDS: "a hint alone"}
        known = signature.failure.value.replace("_", " ") if exact else "a hint alone"
        failure = names.get(signature.weight, known)
        settings = [
            f"`{text.removesuffix('=half')}{' halved' * text.endswith('=half')}`"
            for text in signature.settings.values()
        ]
        hint = re.sub(GROUP, r"...", chosen(signature.hint, {}))
        yield f"| {words} | {signature.category} | {failure} | {_line('; '.join([hint, *dict.fromkeys(settings)]))} |"


_KINDS: Final = {
    "gates": gates,
    "rules": rules,
    "precisions": precisions,
    "requirements": requirements,
    "gpus": gpus,
    "memory": weights,
    "placeholders": placeholders,
    "refusals": refusals,
    "families": families,
    "failures": failures,
    "screen": screens.screen,
}


def rendered(text: str) -> str:
    """A page with its generated tables as they must be."""

    def table(match: re.Match[str]) -> str:
        lines = "\n".join(_KINDS[match[2]](match[3]))
        return f"{match[1]}\n{lines}\n\n{match[4]}"

    return BLOCK.sub(table, text)


def commands_page() -> Iterator[str]:
    """Every command with its help, examples and options."""
    yield _COMMANDS_HEAD
    for row in documented():
        if row.path == "stage download":
            yield f"{_STAGES_HEAD}\n\n" + "\n".join(stages())
        command = command_of(row.path)
        help_text = re.sub(r"(?<![\w./-])docs/([a-z/-]+\.md)", _page_link, command.help or row.help)
        yield f"## pipeline {row.path}\n\n{help_text}"
        yield _examples(command)
        yield "\n".join(options(row.path))


def stages() -> Iterator[str]:
    """The table of the stages that have a command."""
    yield "| stage | what it does | settings | toolchains |"
    yield "|---|---|---|---|"
    known = [toolchains.load(name) for name in toolchains.every_name()]
    for name, stage in toolchains.with_command().items():
        section = stage.section or name
        having = [each.name for each in known if any(own.name == name for own in each.stages)]
        where = "all" if len(having) == len(known) else ", ".join(f"`{each}`" for each in having)
        link = f"[`{section}`](settings.md#settings{section})"
        yield f"| [`{name}`](#pipeline-stage-{name}) | {stage.sentence} | {link} | {where} |"


def _page_link(match: re.Match[str]) -> str:
    return f"[{match[1]}](../{match[1]})" if (FOLDER / match[1]).is_file() else match[0]


def documented() -> list[Command]:
    """The commands, without groups."""
    return [row for row in commands() if row.target]


def _examples(command: Any) -> str:
    lines = (command.epilog or "").partition("Examples:\n")[2].splitlines()
    return "\n".join(["```sh", *(line.removeprefix("  ") for line in lines), "```"]) if lines else ""


_COMMANDS_HEAD: Final = """\
# Commands

`pipeline --help` lists the commands, and `pipeline COMMAND --help` shows what this page shows. `trtllm-pipeline` and
`python -m trtllm_pipeline` are other names of `pipeline`.

Data goes to stdout, progress and messages go to stderr. `--format json` prints one JSON object with `"schema": 1`
([keys](json.md)). [Exit codes](../running.md#exit-codes). Escape sequences in text from models, servers or files are
never printed.

| option | meaning |
|---|---|
| `-m, --matrix FILE` | the matrix: a file, or the name of a shipped one. It may also be the first argument: `pipeline run my.yaml` |
| `--cells PATTERN` | only cells that match. `'!PATTERN'` excludes cells. Repeatable ([patterns](../matrix.md#cells)) |
| `--set KEY=VALUE` | change a setting, axis or recipe. Repeatable ([keys](../matrix.md#change-one-thing-from-the-command-line)) |
| `--toolchain NAME` | toolchain of cells whose matrix names none |
| `--assume MACHINE` | plan for another machine ([keys](machines.md#another-machine---assume)) |
| `-w, --workspace DIR` | the directory of all results. Default: `.pipeline` |
| `--format FORMAT` | output format. Default: `text` or `table` |

`PIPELINE_WORKSPACE`, `PIPELINE_TOOLCHAIN` and `PIPELINE_PROGRESS` replace the options of these names if they are not
given. `--debug` before a command shows tracebacks of expected errors. `pipeline --install-completion` sets up
completion for bash, zsh and fish."""


_STAGES_HEAD: Final = """\
## pipeline stage

A stage is one kind of work. `pipeline run` runs all that a cell needs. The command of a stage runs it alone, for cells of a
matrix or on explicit files."""


def settings_page() -> Iterator[str]:
    """Every key of matrices and recipes."""
    definitions = _schema("matrix")["$defs"]
    yield _SETTINGS_HEAD
    yield "\n".join(fields("Matrix"))
    yield "### Axes\n\n" + "\n".join(fields("Axes"))
    yield "## Settings\n\n`timeout_s` limits one attempt of a stage. `retries` counts retries after a transient failure."
    for section, field in definitions["Settings"]["properties"].items():
        name = field["$ref"].rpartition("/")[2]
        yield _section(section, definitions[name])
        for key, inner in definitions[name]["properties"].items():
            nested = _nested(inner)
            if nested:
                yield _section(f"{section}.{key}", definitions[nested])
    yield "## Recipes\n\n[Matrix](../matrix.md#recipes) shows how to write one.\n\n" + "\n".join(fields("Recipe"))
    for name, source in _schema("recipe")["$defs"].items():
        if name.endswith("Source"):
            yield f"### {name}\n\n{_words(source)}\n\n" + "\n".join(fields(name))
    yield _RECIPES_HEAD + "\n".join(recipes(""))
    yield "## Shipped matrices\n\n" + "\n".join(matrices(""))


def _section(section: str, definition: Mapping[str, Any]) -> str:
    return f"### settings.{section}\n\n{_words(definition)}\n\n" + "\n".join(settings(section, definition))


def _nested(field: Mapping[str, Any]) -> str | None:
    """The definition that a field refers to, directly or next to null."""
    parts = [field, *field.get("anyOf", ()), *field.get("allOf", ())]
    names = [part["$ref"].rpartition("/")[2] for part in parts if "$ref" in part]
    return names[0] if names and names[0] != "JsonValue" else None


def _words(schema: Mapping[str, Any]) -> str:
    return " ".join(schema.get("description", "").split())


_SETTINGS_HEAD: Final = """\
# Settings

Every key of matrices and recipes, with values and default. [Matrix](../matrix.md) explains how they work together.
`pipeline matrix schema` prints the same as a JSON Schema.

## Matrix"""
_RECIPES_HEAD: Final = """\
## Shipped recipes

Releases are of TensorRT-LLM, by backend. A dash means that the backend does not have the model, an empty cell that nothing
is known. `pipeline models show NAME` has the precisions and the source of each statement.

"""


def json_page() -> Iterator[str]:
    """Every key of the JSON that commands print and artifacts hold."""
    yield _JSON_HEAD
    for path in sorted((FOLDER / "schemas").glob("*.json")):
        name = path.stem
        printed = [f"`pipeline {words}`" for words in json_schemas.OUTPUTS.get(name, ())[:1]]
        files = [f"`{json_schemas.FILES[name]}` of a workspace"] if name in json_schemas.FILES else []
        head = f"## {name.replace('-', ' ').capitalize()}\n\nRecorded from {' and '.join([*printed, *files])}."
        yield f"{head} Schema: [{path.name}](../schemas/{path.name}).\n\n" + "\n".join(output(name))


_JSON_HEAD: Final = """\
# JSON

Every key of the JSON that commands print and that artifacts hold, with its type. [Files and formats](formats.md) says what
the keys mean. The tables come from JSON Schemas that are recorded from real runs (`python docs/json_schemas.py`), and a
test validates another run by them.

"Statistics" are objects of numbers: `n`, `min`, `mean`, `p50`, `p75`, `p90`, `p95`, `p99`, `max`. Later releases may add
keys: ignore what you do not know."""
PAGES: Final[Mapping[str, Callable[[], Iterator[str]]]] = {
    "reference/commands.md": commands_page,
    "reference/settings.md": settings_page,
    "reference/json.md": json_page,
}
"""Pages that are generated whole."""


def pages() -> dict[Path, str]:
    """Every page of the documentation as it must be."""
    written = {
        page: rendered(page.read_text(encoding="utf-8"))
        for page in sorted(FOLDER.rglob("*.md"))
        if str(page.relative_to(FOLDER)) not in PAGES
    }
    whole = {FOLDER / name: "\n\n".join(filter(None, make())) + "\n" for name, make in PAGES.items()}
    return {**written, **whole}


def main() -> None:
    """Bring the pages up to date."""
    stale = [
        (page, text) for page, text in pages().items() if not page.exists() or page.read_text(encoding="utf-8") != text
    ]
    for page, text in stale:
        page.write_text(text, encoding="utf-8")
    sys.stdout.write(f"written: {', '.join(str(page.relative_to(FOLDER)) for page, _ in stale) or 'nothing'}\n")


if __name__ == "__main__":
    main()
