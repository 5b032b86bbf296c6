"""The script `start` of a bundle: the launch stage's work, on a host with this project, or only with NVIDIA's image.

It needs a POSIX shell, and `pipeline` for the embedded toolchain, or tritonserver, mpirun or trtllm-serve for
TensorRT-LLM's. The bundle is only read. It may be in any directory, and is accessed through a link in the script's own
working directory, where the repository is filled with that link's path. Its parts are in `data/start`; `@...@` are
filled here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline import PACKAGE
from trtllm_pipeline.tensorrt.servers.command_lines import MPIRUN, Ports, argv, script_uses_mpirun
from trtllm_pipeline.tensorrt.servers.triton_server import CLOSED

BUNDLE: Final = "@BUNDLE@"
"""Placeholder for the bundle's directory in its repository."""
_EXIT_S: Final = 10
"""Time that requests in flight may take after a stop signal."""
_VARIABLES: Final = {
    # option of our own code -> the script's variable
    "@host@": "${host}",
    "@http@": "${http_port}",
    "@grpc@": "${grpc_port}",
    "@metrics@": "${metrics_port}",
    "@closing@": "$closing",
    "@run@": "${run_prefix}",
    "@repository@": "${work}/repository",
    BUNDLE: "${work}/bundle",
}
_PARTS: Final = re.compile("|".join(map(re.escape, _VARIABLES)))


def script(
    kind: str, *, world_size: int = 1, release: str | None = None, command: Sequence[str] = (), images: bool = False
) -> str:
    """The text of `start` for a server of this kind (see `Deployment.kind`), with a visual engine if it accepts
    `images`. `command` is the one of trtllm-serve.
    """
    if kind == "embedded":
        words = ["pipeline", "stage", "launch", "--toolchain", "embedded"]
        words += ["--repository", "@repository@", "--host", "@host@"]
        words += [f"--{name}-port=@{name}@" for name in Ports._fields]
        return _text(_part("embedded"), words)
    if kind == "trtllm_serve":
        words = [*command, "--host", "@host@", "--port", "@http@"]
        launched = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(world_size), "trtllm-llmapi-launch"]
        return _text(_part("trtllm_serve"), words, [*launched, *words])
    ports: Any = Ports("@http@", "@grpc@", "@metrics@")  # type: ignore[arg-type]  # words, for the shell
    ranks = world_size if kind == "engine" else 1
    words = argv(
        "tritonserver",
        Path("@repository@"),
        ports,
        ranks,
        mpirun=MPIRUN,
        run_prefix="@run@",
        root=True,
        log=None,
        host="@host@",
        options=["@closing@", f"--exit-timeout-secs={_EXIT_S}"],
        images=images,
    )
    if ranks > 1:
        return _text(_part("triton").replace("@by_mpirun@", ""), words)
    before, alone = words[: words.index("tritonserver")], words[words.index("tritonserver") :]
    wanted = '[ -n "${MPIRUN_OPTIONS:-}" ]'
    if release is not None and script_uses_mpirun(release):
        wanted += " || command -v mpirun > /dev/null"
    chosen = ""
    if kind == "engine":
        chosen = "\n" + _part("one_rank").replace("@wanted@", wanted).replace("@mpirun@", _shell(before))
    return _text(_part("triton").replace("@by_mpirun@", chosen), alone)


def _part(name: str) -> str:
    return (PACKAGE / "data" / "start" / f"{name}.sh").read_text(encoding="utf-8").rstrip("\n")


def _text(part: str, words: Sequence[str], multi_node: Sequence[str] = ()) -> str:
    text = (
        f"{_part('start')}\n".replace("@part@", part)
        .replace("@closed@", ",".join(CLOSED))
        .replace("@patience@", str(_EXIT_S + 5))
    )
    return text.replace("@multi_node@", _shell(multi_node)).replace("@command@", _shell(words))


def _shell(words: Sequence[str]) -> str:
    """`words` for a shell, one line for each program that mpirun starts, with variables in place of our marks."""
    quoted = [_word(word) for word in words]
    lines, line = [], ""
    for word in quoted:
        if word == ":" or len(line) + len(word) > 110:
            lines.append(line)
            line = ""
        line = f"{line} {word}".strip()
    return " \\\n    ".join([*lines, line]).replace('"$closing"', "$closing")


def _word(word: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9_./:=,+-]+", word):
        return word
    parts = _PARTS.split(word)
    marks = [_VARIABLES[mark] for mark in _PARTS.findall(word)]
    safe = [re.sub(r'([\\"$`])', r"\\\1", part) for part in parts]
    marks.append("")
    return '"' + "".join(text + mark for text, mark in zip(safe, marks, strict=True)) + '"'
