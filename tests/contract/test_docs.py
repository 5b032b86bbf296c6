"""The documentation is true: its commands exist and run, its tables are the code's, its links lead somewhere."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import generate
import pytest
import typer
import yaml

from trtllm_pipeline.orchestrate.matrix.models import Settings, json_schema
from trtllm_pipeline.orchestrate.matrix.recipe_files import matrices_folder, recipes_folder
from trtllm_pipeline.show.cli import bench
from trtllm_pipeline.show.cli.app import main
from trtllm_pipeline.tensorrt.trtllm import program_options as tensorrt_llm_options

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
COMMANDS_PAGE = DOCS / "reference" / "commands.md"
SETTINGS_PAGE = DOCS / "reference" / "settings.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
PAGES_WITH_COMMANDS = [
    ROOT / "README.md",
    *(DOCS / f"{page}.md" for page in ("running", "matrix", "models", "nightly", "tensorrt-llm")),
    DOCS / "reference" / "machines.md",
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9_-]+")
SCRIPTS = (
    "benchmarks/agreement.py",
    "benchmarks/client.py",
    "benchmarks/fuzz_wire.py",
    "benchmarks/gateway.py",
    "benchmarks/kill_resume.py",
    "benchmarks/makespan.py",
    "benchmarks/needs.py",
    "benchmarks/quantize.py",
    "benchmarks/search.py",
    "benchmarks/startup.py",
    "docs/generate.py",
    "docs/json_schemas.py",
    "docs/record.py",
    "docs/walk.py",
    "examples/agent.py",
    "examples/stream.py",
    "maintenance/record_release.py",
)
NEED_A_SERVER = ("launch", "smoke", "perf", "accuracy", "score")
"""Stages whose commands are only parsed. The others are quick with a tiny model, and run."""
NEED_TENSORRT_LLM = ("adapter", "quantize", "check", "visual", "repository")
NEED_MEASUREMENTS = ("compare", "recommend", "search")
NEED_MORE = ("bench", "eval", "serve", "chat", "export")
"""Commands that need servers."""
LOOKING = ("status", "explain", "logs", "report", "store")
"""Commands about the latest run. They run where it is the one of the whole matrix, whatever the page's other commands did."""
WRITTEN_BY_MATRIX_INIT = "my-matrix.yaml"
_TRTLLM_PAGES = ("coming-from-other-tools.md", "gpu-machine.md", "tensorrt-llm.md", "troubleshooting.md", "clusters.md")
_OTHER_FLAGS = {
    "tensorrt-llm.md": (  # vLLM and SGLang
        *("--tensor-parallel-size", "--data-parallel-size", "--enable-expert-parallel"),
        *("--tp-size", "--dp-size", "--enable-dp-attention", "--ep-size"),
    ),
    "vllm.md": (  # vllm bench serve, aiperf, SGLang, transformers serve
        *(
            "--dataset-name",
            "--random-input-len",
            "--random-output-len",
            "--max-concurrency",
            "--num-prompts",
            "--quantization",
        ),
        *(
            "--osl",
            "--extra-inputs",
            "--request-count",
            "--continuous-batching",
            "--compile",
            "--dtype",
            "--context-length",
        ),
        *("--model-path", "--max-running-requests", "--disable-radix-cache", "--mem-fraction-static"),
        *("--attention-backend", "--sampling-backend"),
    ),
    "README.md": ("--build-arg", "--gpus", "--init", "--rm", "--shm-size", "--ulimit"),  # docker
    "clusters.md": ("--head", "--port", "--address", "--bind-to", "--partition", "--account", "--time"),  # ray, sbatch
    "coming-from-other-tools.md": (
        *(
            "--gpus",
            "--shm-size",
            "--service-kind",
            "--world_size",
            "--model_repo",
            "--measurement-interval",
            "--max_tokens",
        ),
        *(
            "--random-input-len",
            "--random-output-len",
            "--max-concurrency",
            "--max-num-batched-tokens",
            "--enforce-eager",
            "--dataset-name",
            "--dataset-path",
        ),
        *("--input-file", "--custom-dataset-type", "--fixed-schedule"),
        "--no-",
    ),
    "commands.md": ("--config", "--web", "--homepath"),  # Prometheus, Grafana
    "deploying.md": (  # docker, kubectl, tar, sha256sum
        *("--build-arg", "--detach", "--wait", "--label-columns", "--from-literal", "--for", "--timeout", "--quiet"),
        *("--rm", "--restart", "--labels", "--image"),
    ),
    "gpu-machine.md": ("--build-arg", "--format", "--gpus", "--init", "--rm", "--runtime", "--shm-size", "--ulimit"),
    "images.md": ("--build-arg", "--format", "--require-hashes"),
    "performance.md": (
        "--backend",
        "--dataset",
        "--engine_dir",
        "--report_json",
        "--collect-interval",
    ),  # trtllm-bench, dcgm-exporter
    "provenance.md": (  # cosign, sha256sum
        *("--bundle", "--key", "--type", "--digest", "--new-bundle-format", "--insecure-ignore-tlog", "--quiet"),
        "--strict",
    ),
    "security.md": (
        *("--model-control-mode", "--http-restricted-api", "--grpc-restricted-protocol", "--allow-vertex-ai"),
    ),
    "serving.md": ("--config", "--web", "--homepath"),  # Prometheus, Grafana
    "troubleshooting.md": ("--ulimit",),
    "verified.md": ("--require-hashes",),
}
"""Page -> options of other programs in it."""


@dataclass(frozen=True)
class Command:
    """One line of a shell block: its words up to a pipe or redirection."""

    page: str
    text: str
    words: tuple[str, ...]
    rest: tuple[str, ...]


def name(value: object) -> str:
    return value.name if isinstance(value, Path) else str(value)


def blocks(page: Path, *languages: str) -> Iterator[str]:
    for language, text in FENCE.findall(page.read_text(encoding="utf-8")):
        if language in languages:
            yield text


def commands(page: Path) -> Iterator[Command]:
    """Every command of a page's shell blocks, those joined by && one by one."""
    for block in blocks(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            for part in line.split(" && "):
                lexer = shlex.shlex(part, posix=True, punctuation_chars="|><;")
                lexer.whitespace_split = True
                words = list(lexer)
                end = next((i for i, word in enumerate(words) if set(word) <= set("|><;")), len(words))
                if words:
                    yield Command(page.name, part.strip(), tuple(words[:end]), tuple(words[end:]))


ALL = [command for page in PAGES if page != COMMANDS_PAGE for command in commands(page)]
"""Without those of the generated page, which `tests/unit/cli` reads where they come from."""


def names() -> list[str]:
    """Every command, each under one name."""
    return [row.path for row in generate.documented()]


def parse(words: tuple[str, ...]) -> dict[str, object]:
    """What `pipeline WORDS` would be read as. Raises SystemExit or a Typer error."""
    command, path, rest = generate.command_of(""), "", list(words)
    while rest and rest[0] in getattr(command, "commands", {}):
        path = f"{path} {rest.pop(0)}".strip()
        command = generate.command_of(path)
    if hasattr(command, "commands"):
        raise typer.BadParameter(f"there is no command {' '.join(words)!r}")
    return dict(command.make_context(path, rest).params)


def test_there_is_something_to_check() -> None:
    assert len(ALL) > 80
    assert {command.words[0] for command in ALL if command.words[0].startswith("pipe")} == {"pipeline"}


@pytest.mark.parametrize(
    "command", [each for each in ALL if each.words[0].endswith("pipeline")], ids=lambda each: each.text
)
def test_commands_parse(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        args = parse(command.words[1:])
    except (SystemExit, typer.TyperException) as error:
        pytest.fail(f"{command.page}: {command.text}\n{error}\n{capsys.readouterr().err}")
    named = [args.get("matrix"), *(args.get("files") or ()), args.get("file")]
    missing = [file for file in map(str, filter(None, named)) if not (ROOT / file).exists()]
    assert set(missing) <= {WRITTEN_BY_MATRIX_INIT}


@pytest.mark.parametrize(
    "command", [each for each in ALL if each.words[0].startswith("python")], ids=lambda each: each.text
)
def test_scripts_exist_and_have_these_flags(command: Command) -> None:
    if command.words[1] == "-m":
        assert command.words[2] in {"venv", "trtllm_pipeline"}
        return
    assert command.words[1] in SCRIPTS
    source = (ROOT / command.words[1]).read_text(encoding="utf-8")
    for word in command.words[2:]:
        if word.startswith("--"):
            without = f'"--{word.removeprefix("--no-")}", action=argparse.BooleanOptionalAction'
            assert f'"{word}"' in source or without in source


def test_other_programs_are_known() -> None:
    known = {
        "git",
        "cd",
        "pipeline",
        "python",
        "python3",
        "curl",
        "ruff",
        "mypy",
        "lint-imports",
        "pytest",
        "pip",
        "mkdocs",
        "mkdir",
        "echo",
        "openssl",
        "cp",
        "docker",
        "kubectl",
        "sha256sum",
        "export",
        "start",
        "tar",
        "sh",
        "source",
        "vllm",
        "sglang",
        "aiperf",
    }
    assert {Path(command.words[0]).name for command in ALL} <= known


@pytest.mark.parametrize("full", names())
def test_every_command_has_an_example(full: str) -> None:
    text = COMMANDS_PAGE.read_text(encoding="utf-8")
    section = re.search(rf"^## pipeline {full}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert section is not None, "python docs/generate.py"
    examples = "".join(body for language, body in FENCE.findall(section[1]) if language == "sh")
    assert f"pipeline {full} " in f"{examples} ".replace("\n", " ")


def test_generated_pages_and_tables_are_up_to_date() -> None:
    stale = {page.name for page, text in generate.pages().items() if page.read_text(encoding="utf-8") != text}
    assert stale == set(), "python docs/generate.py"


def test_every_setting_axis_and_recipe_field_is_documented() -> None:
    text = SETTINGS_PAGE.read_text(encoding="utf-8")
    for section, values in Settings().model_dump().items():
        part = re.search(
            rf"^### settings\.{section}\n(.*?)(?=^### (?!settings\.{section}\.)|^## )", text, re.MULTILINE | re.DOTALL
        )
        assert part is not None, section
        assert [key for key in values if f"| `{key}` |" not in part[1] and not isinstance(values[key], dict)] == []
    fields = {*json_schema("matrix")["$defs"]["Axes"]["properties"], *json_schema("recipe")["properties"]}
    assert [field for field in fields if f"| `{field}` |" not in text] == []


def test_every_code_of_the_gateway_s_errors_is_documented() -> None:
    sources = (ROOT / "trtllm_pipeline" / "serve" / "gateway").glob("*.py")
    codes = {code for path in sources for code in re.findall(r'\bcode(?:: str)? ?= ?"(\w+)"', path.read_text("utf-8"))}
    assert {"invalid_value", "server_unavailable", "internal_error"} <= codes
    documented = (DOCS / "reference" / "gateway.md").read_text(encoding="utf-8")
    never_received = {"incomplete_body"}  # the client has left
    assert {code for code in codes if f"`{code}`" not in documented} <= never_received


def test_other_tools_names_of_options_are_documented() -> None:
    text = (DOCS / "performance.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`--[^|]*) \| ([^|]*) \|$", text, re.MULTILINE)
    meant = {other: own for own, others in rows for other in FLAG.findall(others)}
    for other, own in bench.OTHER_NAMES.items():
        assert f"`--{own}`" in meant[f"--{other}"]


def test_settings_that_the_embedded_toolchain_reads() -> None:
    read = generate.read_by("embedded")
    assert {"perf.concurrency", "build.max_num_tokens", "serve.threads"} <= read
    assert "quantize.calibration" not in read, "it does not calibrate"


# Causes of failures name options of many other programs.
@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "failures.md"], ids=name)
def test_no_page_mentions_a_flag_that_does_not_exist(page: Path) -> None:
    known = {
        "--help",
        "--install-completion",
        "--show-completion",
        "--version",
        "--debug",
        "--strict",
    }  # the last is mypy's
    for path in names():
        command = generate.command_of(path)
        known |= {flag for param in command.params for flag in (*param.opts, *param.secondary_opts)}
    known |= {f"--{name}" for name in bench.OTHER_NAMES}
    for script in SCRIPTS:
        known |= set(FLAG.findall((ROOT / script).read_text(encoding="utf-8")))
    known |= set(_OTHER_FLAGS.get(page.name, ()))
    text = page.read_text(encoding="utf-8")
    if page.name in _TRTLLM_PAGES or page.parent.name == "reference":
        programs = tensorrt_llm_options.load().values()
        known |= {option for program in programs for option in program.options}
        known |= {*FLAG.findall(" ".join(name for program in programs for name in program.options))}
    if page.name == "clusters.md":  # srun, mpirun and tritonserver
        text = "\n".join(line for line in text.splitlines() if line.strip().startswith("pipeline "))
    assert sorted(set(FLAG.findall(text)) - known) == []


def anchors(page: Path) -> set[str]:
    """The names of a page's headings as GitHub makes them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http:", "https:")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file), target


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_data_blocks_are_what_they_claim(page: Path) -> None:
    for text in blocks(page, "json"):
        for line in text.splitlines():
            json.loads(line)
    for text in blocks(page, "yaml"):
        assert isinstance(yaml.safe_load(text), dict)
    for text in blocks(page, "python"):
        ast.parse(text)
    assert {language for language, _ in FENCE.findall(page.read_text(encoding="utf-8"))} <= {
        "sh",
        "text",
        "json",
        "yaml",
        "python",
    }


def _text(node: ast.AST) -> str | None:
    """The text of a string in source, with ... for what is filled in; None for any other node."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text(part) or "..." for part in parts)
    return None


@lru_cache
def texts_in_source() -> str:
    """Every string of the package but docstrings, a line each."""
    texts = set()
    for path in (ROOT / "trtllm_pipeline").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        texts |= {" ".join(text.split()) for node in nodes if id(node) not in docstrings and (text := _text(node))}
    return "\n".join(sorted(texts))


def quoted_messages(page: str) -> list[str]:
    """The first column of a page's tables whose head is `message`: its quoted parts, one message each."""
    text = (DOCS / page).read_text(encoding="utf-8")
    tables = re.findall(r"^\| message(?: contains)? \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    heads = [row.split("|")[1] for table in tables for row in table.splitlines()]
    return [message for head in heads for message in re.findall(r"`([^`]+)`", head)]


@pytest.mark.parametrize("page", ["troubleshooting.md", "models.md"])
def test_quoted_messages_are_in_the_source(page: str) -> None:
    messages = quoted_messages(page)
    assert len(messages) > 10
    missing = []
    for message in messages:
        pieces = [re.escape(piece.strip()) for piece in re.split(r"\.\.+", message) if piece.strip()]
        if not re.search(".*".join(pieces), texts_in_source()):
            missing.append(message)
    assert missing == [], "a message of this page was reworded or is gone"


def test_pages_that_messages_name_exist() -> None:
    named = set(re.findall(r"(?<![\w./-])docs/[\w/-]+\.md", texts_in_source()))
    assert named
    assert {page for page in named if not (ROOT / page).is_file()} == set()


def test_the_example_matrix_and_recipe_are_valid(tmp_path: Path) -> None:
    from trtllm_pipeline.orchestrate.matrix.expand import expand
    from trtllm_pipeline.orchestrate.matrix.validate import load_matrix

    examples = [text for text in blocks(DOCS / "matrix.md", "yaml") if text.startswith("name: ")]
    matrix, recipe = examples
    (tmp_path / "my-matrix.yaml").write_text(matrix)
    assert len(expand(load_matrix(tmp_path / "my-matrix.yaml"), default_toolchain="embedded")) == 11
    (tmp_path / "my-model.yaml").write_text(recipe)
    sets = ["axes.model=[my-model]"]
    assert len(expand(load_matrix(tmp_path / "my-matrix.yaml", sets), default_toolchain="embedded")) == 11


def test_the_picture_is_a_recorded_run() -> None:
    picture = (ROOT / "docs" / "quickstart.svg").read_text(encoding="utf-8").replace("&#160;", " ")
    assert "pipeline run --matrix matrices/quickstart.yaml" in picture
    assert "3 cells: 3 done" in picture
    assert "@font-face" not in picture, "a picture that is shown as an image cannot fetch fonts"


# ------------------------------------------------------------------------------------------------- running the pages


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory like a clone, with a workspace, where the quickstart's model is a little one made on the spot."""
    pytest.importorskip("xllamacpp")
    folder = tmp_path_factory.mktemp("desk")
    shutil.copytree(matrices_folder(), folder / "matrices")
    (folder / "recipes").mkdir()
    (folder / "matrices" / "recipes").symlink_to(folder / "recipes")
    little = yaml.safe_load((recipes_folder() / "tiny.yaml").read_text(encoding="utf-8"))
    little |= {"name": "smollm2-135m-instruct", "smoke": {"prompt": "The capital of France is"}}
    (folder / "recipes" / "smollm2-135m-instruct.yaml").write_text(yaml.safe_dump(little))
    run(folder, "run", "--matrix", "matrices/quickstart.yaml", "--until", "repository", "--progress", "quiet")
    return folder


def environment(folder: Path) -> dict[str, str]:
    """With leases of its own: tests must not wait for real work on this machine."""
    return {**os.environ, "XDG_RUNTIME_DIR": str(folder), "COLUMNS": "120"}


def run(folder: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "trtllm_pipeline", *words],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def is_cheap(command: Command) -> bool:
    verb, args = command.words[1], set(command.words[2:])
    if "--deep" in args:  # all stages of several cells
        return False
    if verb in {"run", "resume"}:
        return "--until" in args and not args & set(NEED_A_SERVER)
    if verb == "stage":
        return command.words[2] not in {*NEED_A_SERVER, *NEED_TENSORRT_LLM, "replay"}
    if verb == "models":
        return "lint" not in args
    if verb == "logs":
        return not args & set(NEED_A_SERVER)
    return verb not in {*NEED_MEASUREMENTS, *NEED_MORE}


def with_real_ids(folder: Path, words: tuple[str, ...]) -> list[str]:
    """Fingerprints and ids of the examples, replaced by some of this workspace."""

    def fingerprint(stage: str) -> str:
        return min((folder / ".pipeline" / "store" / stage).iterdir()).name

    text = [re.sub(r"store/(\w+)/[0-9a-f]{32}", lambda m: f"store/{m[1]}/{fingerprint(m[1])}", word) for word in words]
    return [re.sub(r"^(build)-[0-9a-f]{12}$", lambda m: f"{m[1]}-{fingerprint(m[1])[:12]}", word) for word in text]


@pytest.mark.parametrize("page", PAGES_WITH_COMMANDS, ids=name)
def test_commands_run(
    page: Path, desk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cheap ones, in the order of the page, in copies of the desk: they may build on each other."""
    for key, value in environment(tmp_path).items():
        monkeypatch.setenv(key, value)
    folders = {looking: tmp_path / f"desk-{looking}" for looking in (False, True)}
    for folder in folders.values():
        shutil.copytree(desk, folder, symlinks=True)
    ran = 0
    for command in commands(page):
        if not command.words[0].endswith("pipeline") or not is_cheap(command):
            continue
        folder = folders[command.words[1] in LOOKING]
        monkeypatch.chdir(folder)
        words = with_real_ids(folder, command.words[1:])
        monkeypatch.setattr(sys, "argv", ["pipeline", *words])
        code = main(words)
        shown = capsys.readouterr()
        assert code == 0, f"{command.page}: {command.text}\n{shown.out}\n{shown.err}"
        if "json" in words and "--output" not in words:
            assert json.loads(shown.out)["schema"] == 1, command.text
        shutil.rmtree(folder / "replay", ignore_errors=True)
        ran += 1
    assert ran > 0


@pytest.mark.thorough
def test_clients_talk_to_the_server_as_the_pages_say(desk: Path) -> None:
    """`launch` as documented, then every curl, script and Python block of the pages; the ports are free ones."""
    launch = next(each for each in ALL if each.page == "embedded.md" and each.words[1:3] == ("stage", "launch"))
    words = [word for word in launch.words[1:] if word not in {"--http-port", "8000", "--grpc-port", "8001"}]
    server = subprocess.Popen(
        [sys.executable, "-m", "trtllm_pipeline", *words, "--format", "json"],
        cwd=desk,
        env=environment(desk),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        lines = []
        for line in server.stdout:
            lines.append(line)
            if line.startswith("}"):
                break
        service = json.loads("".join(lines))
        ports = {"127.0.0.1:8000": service["http"], "127.0.0.1:8001": service["grpc"]}

        def here(text: str) -> str:
            for documented, real in ports.items():
                text = text.replace(documented, real)
            return text

        def answer(*argv: str) -> str:
            shown = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
            assert shown.returncode == 0, f"{argv}\n{shown.stdout}\n{shown.stderr}"
            return shown.stdout

        for command in ALL:
            # /v1 needs a gateway: tests/integration/test_serve.py.
            if command.words[0] == "curl" and "/v1/" not in command.text and shutil.which("curl"):
                response = answer(*map(here, command.words))
                assert "text_output" in response, f"{command.text}\n{response}"
            elif command.words[:2] == ("python", "examples/stream.py"):
                assert answer(sys.executable, *map(here, command.words[1:])).strip()
        scripts = [text for page in PAGES for text in blocks(page, "python")]
        assert scripts
        for text in scripts:
            assert answer(sys.executable, "-c", here(text)).strip() or "print(" not in text
    finally:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.communicate(timeout=60)
        server.kill()
