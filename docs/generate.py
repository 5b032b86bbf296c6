"""Writes the tables of the documentation that the code knows better: axes, settings, recipes, options of commands.

    python docs/generate.py            bring docs/*.md up to date
    python docs/generate.py --check    exit code 1 if they are not

A table stands between `<!-- generated: KIND NAME -->` and `<!-- end -->`; everything else in a page is written by hand.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Final

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
from trtllm_pipeline.show.cli.command_signatures import MATRIX_WORD
from trtllm_pipeline.tensorrt.diagnosis.signatures import Weight, signatures
from trtllm_pipeline.tensorrt.stage.params import MOST_TOKENS
from trtllm_pipeline.tensorrt.toolchains import catalog as toolchains
from trtllm_pipeline.tensorrt.toolchains import model_shape
from trtllm_pipeline.tensorrt.trtllm.releases import FAMILIES
from trtllm_pipeline.tensorrt.trtllm.rules import RULES as REFUSALS
from trtllm_pipeline.tensorrt.trtllm.templates import FIXED, PLACEHOLDERS

FOLDER: Final = Path(__file__).parent
BLOCK: Final = re.compile(r"(<!-- generated: (\w+) ([\w -]*?) ?-->\n).*?(<!-- end -->)", re.DOTALL)
SHARED: Final = ("--help", "--matrix", "--cells", "--set", "--toolchain", "--workspace", "--assume", "--format")
"""Options explained once, at the top of commands.md."""
_EVERYWHERE: Final = ("timeout_s", "retries")
_NOWHERE: Final = "—"
_BACKENDS: Final = {"tensorrt_llm": "engines", "tensorrt_llm_pytorch": "PyTorch"}
_RELEASES: Final = (*(f"0.{minor}.0" for minor in range(8, 22)), "1.0.0", "1.1.0", "1.2.0", "1.3.0rc20", "1.3.0rc21")
_COMPUTE_CAPABILITIES: Final = (75, 80, 86, 89, 90, 100, 103, 120)
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
        flags = [*param.opts, *param.secondary_opts] if is_option else [param.metavar or param.name.upper()]
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
    """The default as people type it."""
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


def read_by(toolchain: str) -> set[str]:
    """`SECTION.KEY` of each setting that some stage of a toolchain reads, found by asking its stages."""
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
    return {f"{name}.{key}" for name, section in sections.items() for key in (*section.read, *_EVERYWHERE)}


def settings(name: str) -> Iterator[str]:
    """The table of one settings section, or of a mapping in one."""
    schema = json_schema("matrix")
    definition = schema["$defs"][name]
    section = name.lower()
    used = read_by("embedded")
    yield "| key | values | default | meaning |"
    yield "|---|---|---|---|"
    for key, field in definition["properties"].items():
        if "$ref" in field and field["$ref"].endswith("/Calibration"):
            continue  # a table of its own
        what = field.get("description", "")
        if section not in {"calibration", "gateway", "openai"} and f"{section}.{key}" not in used:
            what += " The embedded toolchain does not read it."
        default = json.dumps(field.get("default"), ensure_ascii=False)
        yield f"| `{key}` | {values(field)} | `{default}` | {_line(what)} |"


def fields(name: str) -> Iterator[str]:
    """The table of an object of the schemas: its keys, which must be there, and what they mean."""
    kind = "recipe" if name in {"Recipe", "RecipeSmoke"} or name.endswith("Source") else "matrix"
    schema = json_schema("recipe" if kind == "recipe" else "matrix")
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
    yield "| gate | looks at | does not pass | because |"
    yield "|---|---|---|---|"
    for gate in GATES:
        yield f"| `{gate.id}` | {_line(gate.what)} | {_line(gate.limit)} | {_line(gate.why)} |"


def values(field: Mapping[str, Any]) -> str:
    """What a field of a JSON Schema takes, in words."""
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
            words = "whole number" if number == "integer" else "number"
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
    """On which GPUs each precision works, by backend and release: the answers of the toolchains themselves.

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


def gpus(_name: str) -> Iterator[str]:
    """What each generation of GPUs can compute with a release that has both backends: the toolchains' own answers.

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
    """Which backends take this on a GPU, in words."""
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
    """Path, schema and whether it is always there, of every key below a schema."""
    if "items" in schema:
        yield from _keys(schema["items"], f"{path}[]")
    for name, part in schema.get("properties", {}).items():
        inner = f"{path}.{name}".lstrip(".")
        yield inner, part, name in schema.get("required", ())
        yield from _keys(part, inner)


def _type(schema: Mapping[str, Any]) -> str:
    """What a key of an output holds, in words."""
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
            words.append(
                {"array": "list", "string": "text", "integer": "whole number", "null": "`null`"}.get(kind, kind)
            )
    return " or ".join(words)


def recipes(_name: str) -> Iterator[str]:
    """The table of shipped recipes."""
    yield "| recipe | model | parameters | engines | PyTorch | licence |"
    yield "|---|---|---:|---|---|---|"
    for path in sorted(recipes_folder().glob("*.yaml")):
        recipe = load_recipe(path)
        spans = [_releases(recipe, backend) for backend in _BACKENDS]
        size = "" if recipe.parameters is None else f"{recipe.parameters / 1e9:.2g} B"
        yield f"| `{recipe.name}` | {_line(recipe.summary)} | {size} | {' | '.join(spans)} | {_line(recipe.license)} |"


def _releases(recipe: Recipe, backend: str) -> str:
    """The releases of a backend that have a recipe's model, where the recipe says so."""
    precisions = recipe.precisions
    if isinstance(precisions, Mapping) and not precisions.get(backend, ("unknown",)):
        return _NOWHERE
    return f"`{recipe.releases[backend]}`" if backend in recipe.releases else ""


def matrices(_name: str) -> Iterator[str]:
    """The table of shipped matrices."""
    yield "| matrix | what it measures |"
    yield "|---|---|"
    for path in sorted(matrices_folder().glob("*.yaml")):
        yield f"| [`{path.stem}`](../matrices/{path.name}) | {_line(summary(path))} |"


def placeholders(_name: str) -> Iterator[str]:
    """The placeholders of Triton's templates that are called otherwise in a matrix, or that nobody sets."""
    yield "| placeholder | here |"
    yield "|---|---|"
    for setting, placeholder in PLACEHOLDERS.items():
        if setting != placeholder:
            yield f"| `{placeholder}` | `settings.repository.{setting}` |"
    for placeholder in FIXED:
        yield f"| `{placeholder}` | {_FILLED_BY[placeholder]} |"


def _works_on(backend: str, release: str, precision: str, kv: str | None) -> str:
    """The compute capabilities on which a toolchain does not refuse this, in words."""
    works = [_works(backend, release, sm, precision, kv) for sm in _COMPUTE_CAPABILITIES]
    runs = itertools.groupby(zip(works, _COMPUTE_CAPABILITIES, strict=True), lambda pair: pair[0])
    return ", ".join(_span([sm for _, sm in run]) for works_here, run in runs if works_here) or _NOWHERE


def _works(backend: str, release: str, sm: int, precision: str, kv: str | None) -> bool:
    """Whether a toolchain takes this on one GPU."""
    sections = Settings().model_dump(mode="json")
    sections["quantize"]["kv_cache_precision"] = kv
    cell = Cell(CellId("x"), "x", backend, precision, 1, 1, 1, 128, 128, _ONE_GPU, sections)
    toolchain = toolchains.load(backend)
    machine = assume.parse(f"tensorrt_llm=={release},sm={sm},gpus=1,gpu_memory_gib=80")
    return toolchain.missing(machine) is None and toolchain.infeasible(cell, machine) is None


def _span(values: Sequence[object]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"


def refusals(_name: str) -> Iterator[str]:
    """The table of what TensorRT-LLM refuses after its options are parsed."""
    yield "| rule | name | backend | releases | severity | finds | says who | what to do |"
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
            rule.hint or "as it says",
        )
        yield f"| `{rule.id}` | {' | '.join(map(_line, cells))} |"


def families(_name: str) -> Iterator[str]:
    """The table of architecture families that become engines."""
    yield "| family | script | engines | over GPUs (tp) | in stages (pp) | whole experts (ep) |"
    yield "|---|---|---|---|---|---|"
    for name, family in FAMILIES.items():
        since = [family.since, max(family.since, family.tensor_parallel, key=_numbers)]
        stages = family.pipeline_parallel and max(family.since, family.pipeline_parallel, key=_numbers)
        words = [f"from {each}" if each else _NOWHERE for each in (*since, stages, family.expert_parallel)]
        yield f"| `{name}` | `{family.script}` | {' | '.join(words)} |"


def _numbers(release: str) -> list[int]:
    return [int(number) for number in release.split(".")]


@cache
def _screens() -> ModuleType:
    spec = importlib.util.spec_from_file_location("screens", FOLDER / "screens.py")
    assert spec is not None
    assert spec.loader is not None
    screens = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(screens)
    return screens


def screen(name: str) -> Iterator[str]:
    """What a terminal shows while a run continues."""
    yield from _screens().screen(name)


def failures(_name: str) -> Iterator[str]:
    """The table of words in logs that say what failed."""
    yield "| words in a log | what | class | what to do |"
    yield "|---|---|---|---|"
    for signature in signatures():
        words = ", ".join(f"`{_line(each)}`" for each in signature.met)
        names = {Weight.SYMPTOM: "a symptom", Weight.CLASS: "a hint alone"}
        failure = names.get(signature.weight, signature.failure.value.replace("_", " "))
        settings = [
            f"`{text.removesuffix('=half')}{' halved' * text.endswith('=half')}`"
            for text in signature.settings.values()
        ]
        hint = re.sub(r"\{(\w+)\}", r"...", signature.hint)
        yield f"| {words} | {signature.category} | {failure} | {_line('; '.join([hint, *dict.fromkeys(settings)]))} |"


_KINDS: Final = {
    "options": options,
    "settings": settings,
    "fields": fields,
    "gates": gates,
    "rules": rules,
    "precisions": precisions,
    "gpus": gpus,
    "memory": weights,
    "matrices": matrices,
    "placeholders": placeholders,
    "recipes": recipes,
    "output": output,
    "refusals": refusals,
    "families": families,
    "failures": failures,
    "screen": screen,
}


def rendered(text: str) -> str:
    """A page with its generated tables as they must be."""

    def table(match: re.Match[str]) -> str:
        lines = "\n".join(_KINDS[match[2]](match[3]))
        return f"{match[1]}\n{lines}\n\n{match[4]}"

    return BLOCK.sub(table, text)


def main() -> int:
    """Write the pages, or say which are out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page is out of date")
    check = parser.parse_args().check
    stale = []
    for page in sorted(FOLDER.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if rendered(text) != text:
            stale.append(page.name)
            if not check:
                page.write_text(rendered(text), encoding="utf-8")
    sys.stdout.write(f"{'out of date' if check else 'written'}: {', '.join(stale) or 'nothing'}\n")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
