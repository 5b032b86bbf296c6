"""Records what a release of TensorRT-LLM takes: options of its programs, placeholders of its Triton templates.

    python maintenance/record_release.py 1.3.0 --source ~/TensorRT-LLM
    python maintenance/record_release.py 1.3.0 --installed
    python maintenance/record_release.py 1.4.0rc1 --schema trtllm-serve-config.schema.json

Shows how the release differs from the package's tables (`data/tensorrt_llm/options.json` and
`tensorrt/stage/repository_settings.py`), an option that came with the form to add. With --write it also writes the release into
`tests/data/tensorrt_llm/recorded.json`: tests then fail until the tables agree. The exit code is 1 where something differs.

Of a source nothing is run but definitions of options, see `definitions.py`. An installed program's `--help` lists no
default unless it prints one, so --source says more. Nothing is fetched.

--schema takes upstream's JSON schema of the LLM API's YAML files, which sources and installations have as well. Its names,
types and choices are recorded in `data/tensorrt_llm/llm_args.json`, against which plans are checked.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from maintenance import definitions  # noqa: E402
from maintenance.definitions import DefinitionsError, Options  # noqa: E402
from trtllm_pipeline.base.errors import UsageError  # noqa: E402
from trtllm_pipeline.base.machine import probe  # noqa: E402
from trtllm_pipeline.models.triton_repository import model_config  # noqa: E402
from trtllm_pipeline.tensorrt.trtllm import installed, llm_args, program_options, releases, templates  # noqa: E402

RECORDED: Final = ROOT / "tests/data/tensorrt_llm/recorded.json"
SERVE: Final = "trtllm-serve"
TEMPLATES: Final = "templates"
"""Key of the record."""
_FOLDERS: Final = ("triton_backend/all_models", "all_models")
_DIFFERENCES: Final = ("gone", "new", "changed")
_BLOCK: Final = re.compile(r"^ {1,8}(?=-)", re.MULTILINE)
_DEFAULT: Final = re.compile(r"[(\[]default:\s*([^)\]]*)[)\]]")


class Recording(NamedTuple):
    """What was read of one release."""

    programs: dict[str, dict[str, Options]]
    """Name in the table of options -> options by subcommand, "" for none."""
    models: dict[str, str]
    """Model of the template set -> text of its config.pbtxt."""
    problems: list[str]
    """What could not be read, in words."""


class Difference(NamedTuple):
    """One thing that a release has otherwise than the table."""

    option: str
    field: str
    words: str


# ------------------------------------------------------------------------------------------------------------ reading


def of_source(root: Path, release: str) -> Recording:
    """What a source checkout has. Raises SystemExit for a folder that is none."""
    if not (root / "tensorrt_llm").is_dir() and not any((root / each).is_dir() for each in _FOLDERS):
        raise SystemExit(f"error: {root} is no checkout of TensorRT-LLM: it has neither tensorrt_llm nor all_models")
    found = Recording({}, {}, [])
    for tool, place in _sources(release).items():
        files = [root / each for each in place if (root / each).is_file()]
        if not files:
            found.problems.append(f"{tool}: the source has none of {', '.join(place)}")
            continue
        try:
            found.programs[tool] = (
                definitions.of_click(files[0], root) if tool == SERVE else {"": definitions.of_argparse(files[0], root)}
            )
        except DefinitionsError as error:
            found.problems.append(f"{tool}: {error}")
    return _with_models(found, next((root / each for each in _FOLDERS if (root / each).is_dir()), None))


def _sources(release: str) -> dict[str, tuple[str, ...]]:
    """Where the programs of a release are in its source, the likeliest place first."""
    converters: dict[str, tuple[str, ...]] = {}
    for name in releases.FAMILIES:
        script = releases.convert_script(release, name)
        converters[releases.convert_tool(name)] = (
            f"examples/{script}",
            f"examples/models/core/{script.removeprefix('models/core/')}",
        )
    for heads in releases.HEADS:
        converters[releases.convert_tool("", heads)] = (f"examples/{releases.convert_script(release, '', heads)}",)
    return {
        "trtllm-build": ("tensorrt_llm/commands/build.py",),
        SERVE: ("tensorrt_llm/commands/serve.py",),
        "quantize.py": (f"examples/{releases.QUANTIZE_SCRIPT}",),
        "run.py": (f"examples/{releases.RUN_SCRIPT}",),
        **converters,
    }


def of_installation() -> Recording:
    """What is installed here. Raises SystemExit without TensorRT-LLM."""
    machine = probe.this_machine()
    if machine.tensorrt_llm is None:
        raise SystemExit("error: TensorRT-LLM is not installed here; --source reads a checkout")
    found = Recording({}, {}, [])
    for tool, command in installed.programs(machine.tensorrt_llm, machine, tuple(releases.FAMILIES)):
        text = None if command is None else program_options.installed_help(command)
        table = {} if text is None else of_help(text)
        if table:
            found.programs[tool] = {"serve" if command and command[-1] == "serve" else "": table}
        else:
            found.problems.append(f"{tool}: {'is not installed' if command is None else 'printed no options'}")
    folder = machine.tensorrt_llm.templates
    return _with_models(found, None if folder is None else Path(folder))


def of_help(text: str) -> Options:
    """Options as a program's --help shows them: spellings, whether they take a value, choices, defaults that it prints."""
    shown = program_options.parse_help(text)
    found: Options = {}
    blocks = _BLOCK.split(text)[1:]
    for block in blocks:
        spellings = [name for name in re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", block.split("  ")[0]) if name in shown]
        name = next((each for each in spellings if each.startswith("--")), "")
        if not name or name == "--help":
            continue
        about = shown[name]
        entry: dict[str, Any] = {"takes_value": about.takes_value}
        if len(spellings) > 1:
            entry["aliases"] = sorted({*spellings} - {name})
        choices = [each for each in about.choices or () if each != "None"]
        entry |= {"type": "enum", "choices": choices} if choices else {"type": "str" if about.takes_value else "bool"}
        default = _DEFAULT.search(" ".join(block.split()))
        if default is not None and about.takes_value and default[1] not in {"", "None"}:
            entry["default"] = default[1].strip("'\"")
        found[name] = entry
    return dict(sorted(found.items()))


def _places(text: str) -> set[str]:
    return {place.name for place in model_config.placeholders(text)}


def _with_models(found: Recording, folder: Path | None) -> Recording:
    for name in templates.MODELS:
        file = None if folder is None else folder / templates.TEMPLATE_SET / name / model_config.FILE_NAME
        if file is not None and file.is_file():
            found.models[name] = file.read_text(encoding="utf-8", errors="replace")
        else:
            found.problems.append(f"template of {name}: was not found")
    return found


# ---------------------------------------------------------------------------------------------------------- comparing


def disagreements(
    tool: str, release: str, listed: Mapping[str, Mapping[str, Any]], *, partial: bool = False, help_only: bool = False
) -> Iterator[Difference]:
    """How the options of a program in `release` differ from the package's table.

    `partial`: not all of them were read. `help_only`: they are from --help, which lists neither all defaults and types nor
    what is required.
    """
    program, met = program_options.load()[tool], set()
    for name, recorded in listed.items():
        spellings = {name, *recorded.get("aliases", ())}
        canonical = next((each for each in map(program.canonical, sorted(spellings)) if each is not None), None)
        form = None if canonical is None else program.at(canonical, release)
        if form is None or canonical is None:
            yield Difference(name, "name", f"is missing in the table: {_form(recorded, release)}")
            continue
        met.add(canonical)
        if {canonical, *form.aliases} != spellings:
            yield Difference(
                name, "aliases", f"is spelt {sorted(spellings)}, in the table {sorted({canonical, *form.aliases})}"
            )
        if form.takes_value != recorded["takes_value"]:
            yield Difference(
                name, "takes_value", f"takes a value: {recorded['takes_value']}, in the table {form.takes_value}"
            )
        choices = {choice for choice in recorded.get("choices") or () if choice is not None}
        known = {*form.choices} if form.choices else set()
        if help_only:  # all is text there
            choices, known = {*map(str, choices)}, {*map(str, known)}
        if choices != known and not (help_only and not choices):
            yield Difference(name, "choices", f"is one of {sorted(map(str, choices))}, in the table {form.choices}")
        if help_only:
            continue
        if form.required != recorded.get("required", False):
            yield Difference(name, "required", f"is required: {recorded.get('required', False)}")
        if recorded["takes_value"] and default_of(recorded) != form.default:
            yield Difference(name, "default", f"is {default_of(recorded)!r} by default, in the table {form.default!r}")
        if recorded.get("deprecated") and form.deprecated is None:
            yield Difference(name, "deprecated", "is deprecated")
    if not partial:
        for name in sorted(set(program_options.known(tool, release)) - met):
            yield Difference(name, "gone", f'is only in the table: {{"since": "{release}", "gone": ""}}')


def default_of(recorded: Mapping[str, Any]) -> object:
    """The default as the table has it: None where it depends on others."""
    default = recorded.get("default")
    if default == "<suppressed>" or isinstance(default, list):
        return None
    return int(default) if recorded["type"] == "int" and default is not None else default


def _form(recorded: Mapping[str, Any], release: str) -> str:
    """The form to be added to options.json."""
    choices = recorded.get("choices")
    kind = (
        "on_off"
        if choices == ["enable", "disable"]
        else {"bool": "switch", "enum": "str"}.get(recorded["type"], recorded["type"])
    )
    form = {"since": release, "type": kind, **({} if choices is None or kind == "on_off" else {"choices": choices})}
    form |= {name: recorded[name] for name in ("default", "nargs", "required", "aliases") if name in recorded}
    return json.dumps(form)


def differences(found: Recording, release: str, *, help_only: bool) -> Iterator[str]:
    """All of them in words, one a line."""
    for tool, table in found.programs.items():
        listed = table.get("serve") or next(iter(table.values()))
        for each in disagreements(tool, release, listed, help_only=help_only):
            yield f"{tool}: {each.option} {each.words}"
    if len(found.models) == len(templates.MODELS):
        places = {name for text in found.models.values() for name in _places(text)}
        recorded = templates.recorded_places(release) | {*templates.FIXED}
        yield from (
            f"templates: ${{{name}}} is missing in repository_settings.py" for name in sorted(places - recorded)
        )
        yield from (f"templates: ${{{name}}} is only in repository_settings.py" for name in sorted(recorded - places))


# ------------------------------------------------------------------------------------------------------------ writing


def write(path: Path, found: Recording, release: str, label: str) -> None:
    """Put the release's entries into the record, in place of earlier ones of the same release and label."""
    document = json.loads(path.read_text(encoding="utf-8"))
    entries: list[tuple[str, dict[str, Any]]] = []
    for tool, table in found.programs.items():
        of_serve = {name or tool: each for name, each in table.items()}
        entries.append((tool, {"subcommands": of_serve} if tool == SERVE else {"options": table[""]}))
    known = {**document["tools"], TEMPLATES: document[TEMPLATES]}
    if found.models:
        entries.append(
            (TEMPLATES, {"placeholders": {name: sorted(_places(text)) for name, text in found.models.items()}})
        )
    for name, entry in entries:
        kept = [each for each in known[name] if (each["release"], each.get("label")) != (release, label)]
        known[name][:] = [*kept, {"release": release, "label": label, **entry}]
    path.write_text(as_text(document), encoding="utf-8")


def as_text(document: Mapping[str, Any]) -> str:
    """The record as JSON, an option a line."""
    tools = ",\n".join(f"  {_compact(tool)}: {_entries(entries)}" for tool, entries in document["tools"].items())
    about, models = _compact(document["about"]), _entries(document[TEMPLATES])
    return f'{{\n "about": {about},\n "tools": {{\n{tools}\n }},\n "{TEMPLATES}": {models}\n}}\n'


_compact: Final = json.JSONEncoder(ensure_ascii=False).encode


def _entries(entries: Sequence[Mapping[str, Any]]) -> str:
    lines = ",\n   ".join(map(_entry, entries))
    return f"[\n   {lines}\n  ]" if entries else "[]"


def _entry(entry: Mapping[str, Any]) -> str:
    parts = []
    for name, value in entry.items():
        if name == "options":
            value = _listed(value, "    ")
        elif name == "subcommands":
            value = ",\n".join(f"     {_compact(each)}: {_listed(table, '     ')}" for each, table in value.items())
            value = f"{{\n{value}}}"
        else:
            value = _compact(value)
        parts.append(f"{_compact(name)}: {value}")
    return f"{{{', '.join(parts)}}}"


def _listed(table: Options, indent: str) -> str:
    lines = ",\n".join(f"{indent} {_compact(name)}: {_compact(about)}" for name, about in table.items())
    return f"{{\n{lines}\n{indent}}}" if table else "{}"


# ------------------------------------------------------------------------------------------------------ JSON schema


def record_schema(path: Path, release: str, label: str, record: Path, *, write: bool) -> bool:
    """Show how a schema differs from the record, and write it there if asked. True if it differs. Raises SystemExit for a
    file that is none.
    """
    try:
        found = llm_args.Schema(release, label, llm_args.compact(json.loads(path.read_text(encoding="utf-8"))))
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {path}: {error}") from error
    shown = json.loads(record.read_text(encoding="utf-8"))["schemas"]
    rows = {row["release"]: llm_args.Schema(**row) for row in shown}
    before = max(
        (each for each in rows if releases.parse(each) <= releases.parse(release)), key=releases.parse, default=""
    )
    complete = {each.release: each for each in llm_args.read(record)}
    known = complete.get(before, llm_args.Schema("nothing", "", {}))
    wrong = [
        f"{word}: {each}" for word, names in zip(_DIFFERENCES, known.compared(found), strict=True) for each in names
    ]
    print(f"schema: {len(found.names())} names")
    print(f"\n{len(wrong)} differences from the record of {known.release}{':' if wrong else ''}")
    for line in wrong:
        print(f"  {line}")
    if write:
        rows[release] = found
        write_schemas(record, [asdict(rows[each]) for each in sorted(rows, key=releases.parse)])
        print(f"\nwritten to {record}")
    return bool(wrong)


def write_schemas(record: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Put these schemas into a record, in place of its own."""
    about = json.loads(record.read_text(encoding="utf-8"))["about"]
    words, schemas = ",\n  ".join(map(_compact, about)), ",\n  ".join(map(_schema, rows))
    record.write_text(f'{{\n "about": [\n  {words}\n ],\n "schemas": [\n  {schemas}\n ]\n}}\n', encoding="utf-8")


def _schema(row: Mapping[str, Any]) -> str:
    """A schema as JSON, a name a line."""
    classes = ",\n    ".join(
        f"{_compact(name)}: {_listed(dict(entries), '    ')}" for name, entries in row["classes"].items()
    )
    head = f'"release": {_compact(row["release"])}, "source": {_compact(row["source"])}'
    head += "" if row.get("whole", True) else ', "whole": false'
    return f'{{{head}, "classes": {{\n    {classes}\n  }}}}'


def main(words: Sequence[str] | None = None) -> int:
    """The command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("release", help="as its package says, such as 1.3.0 or 1.3.0rc3")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--source", type=Path, metavar="DIR", help="a checkout of TensorRT-LLM at that release")
    where.add_argument("--installed", action="store_true", help="what is installed on this machine")
    where.add_argument("--schema", type=Path, metavar="FILE", help=f"upstream's {Path(llm_args.INSTALLED).name}")
    parser.add_argument("--write", action="store_true", help="write the release into the record")
    parser.add_argument("--record", type=Path, metavar="FILE", help="another record than this repository's")
    parser.add_argument("--label", default="", help="where it was read, such as a commit; part of the record")
    asked = parser.parse_args(words)
    try:
        releases.parse(asked.release)
    except UsageError as error:
        parser.error(f"{error.message}; {error.hint}")
    ours = llm_args.RECORDED if asked.schema else RECORDED
    record = asked.record or ours
    if not record.is_file():
        parser.error(f"argument --record: {record} is not there; copy {ours} first")
    if asked.schema:
        label = asked.label or asked.schema.name
        return int(record_schema(asked.schema, asked.release, label, record, write=asked.write))
    found = of_installation() if asked.installed else of_source(asked.source.resolve(), asked.release)
    label = asked.label or f"{asked.release} ({'--help of an installation' if asked.installed else 'source checkout'})"
    if not found.programs and not found.models:
        raise SystemExit("\n".join(("error: nothing was read", *(f"  {problem}" for problem in found.problems))))
    for tool, table in found.programs.items():
        print(f"{tool}: {sum(map(len, table.values()))} options")
    print(f"templates: {len({name for text in found.models.values() for name in _places(text)})} placeholders")
    for problem in found.problems:
        print(f"not read: {problem}")
    wrong = list(differences(found, asked.release, help_only=asked.installed))
    print(f"\n{len(wrong)} differences from the package's tables{':' if wrong else ''}")
    for line in wrong:
        print(f"  {line}")
    if asked.write:
        write(record, found, asked.release, label)
        print(f"\nwritten to {record}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
