"""The script `start` of a bundle: what the launch stage does, for a host that has this project, or only NVIDIA's image.

It needs a POSIX shell, and then `pipeline` for the embedded toolchain, or tritonserver, mpirun or trtllm-serve for
TensorRT-LLM's. The bundle is only read, may lie in any directory, and is reached through a link in its own directory, where
the repository is filled with that link's path.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.tensorrt.servers.command_lines import MPIRUN, Ports, argv, script_uses_mpirun
from trtllm_pipeline.tensorrt.servers.triton_server import CLOSED

BUNDLE: Final = "@BUNDLE@"
"""Stands in a bundle's repository for its directory."""
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
    """The text of `start` for a server of this kind (see `Deployment.kind`), with a visual engine if it takes `images`;
    `command` is that of trtllm-serve.
    """
    if kind == "embedded":
        words = ["pipeline", "stage", "launch", "--toolchain", "embedded"]
        words += ["--repository", "@repository@", "--host", "@host@"]
        words += [f"--{name}-port=@{name}@" for name in Ports._fields]
        return _text(_EMBEDDED, words)
    if kind == "trtllm_serve":
        words = [*command, "--host", "@host@", "--port", "@http@"]
        launched = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(world_size), "trtllm-llmapi-launch"]
        return _text(_SERVE, words, [*launched, *words])
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
        oversubscribe=True,
        log=None,
        host="@host@",
        options=["@closing@", f"--exit-timeout-secs={_EXIT_S}"],
        images=images,
    )
    if ranks > 1:
        return _text(_TRITON.replace("@by_mpirun@", ""), words)
    before, alone = words[: words.index("tritonserver")], words[words.index("tritonserver") :]
    wanted = '[ -n "${MPIRUN_OPTIONS:-}" ]'
    if release is not None and script_uses_mpirun(release):
        wanted += " || command -v mpirun > /dev/null"
    chosen = _ONE_RANK.replace("@wanted@", wanted).replace("@mpirun@", _shell(before)) if kind == "engine" else ""
    return _text(_TRITON.replace("@by_mpirun@", chosen), alone)


def _text(part: str, words: Sequence[str], multi_node: Sequence[str] = ()) -> str:
    text = (
        _SCRIPT.replace("@part@", part.strip("\n"))
        .replace("@closed@", ",".join(CLOSED))
        .replace("@patience@", str(_EXIT_S + 5))
    )
    return text.replace("@multi_node@", _shell(multi_node)).replace("@command@", _shell(words))


def _shell(words: Sequence[str]) -> str:
    """`words` for a shell, a line for each program that mpirun starts, with variables in place of our marks."""
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


_SCRIPT: Final = r"""#!/bin/sh
# Starts the server of this bundle and keeps it until it is stopped (Ctrl-C, SIGTERM). The bundle is only read.
#
#   ./start              listens on 127.0.0.1
#   HOST=0.0.0.0 ./start accepts other hosts. There is no login
#
# Variables: HOST, HTTP_PORT, GRPC_PORT, METRICS_PORT; TMPDIR for a few small files. BUNDLE_WORK names their folder, which
# is kept then; `./start prepare` only fills it.
set -eu

host=${HOST:-127.0.0.1} http_port=${HTTP_PORT:-8000} grpc_port=${GRPC_PORT:-8001} metrics_port=${METRICS_PORT:-8002}

die() { echo "error: $1" >&2; exit 2; }
need() {
    for program in "$@"; do
        command -v "$program" > /dev/null || die "$program is not on PATH; README.md says what this bundle needs"
    done
}

here=$(cd "$(dirname "$0")" && pwd -P)
if [ -n "${BUNDLE_WORK:-}" ]; then
    work=$BUNDLE_WORK
    mkdir -p "$work"
else
    work=$(mktemp -d "${TMPDIR:-/tmp}/bundle.XXXXXX")
fi
run_prefix=
finish() {
    # A server that was killed leaves its files in shared memory.
    [ -z "$run_prefix" ] || rm -f "/dev/shm/$run_prefix"*
    [ -n "${BUNDLE_WORK:-}" ] || rm -rf "$work"
}
trap finish EXIT
case $work in
    /*) ;;
    *) die "$work: TMPDIR and BUNDLE_WORK have to be absolute" ;;
esac
case $work in
    *[!A-Za-z0-9_./+-]*) die "$work: set TMPDIR to a folder whose path has only letters, digits and . _ - +" ;;
esac

# The repository has paths into the bundle, which may have any name: they lead through a link.
rm -rf "$work/repository" "$work/bundle"
ln -s "$here" "$work/bundle"
cp -R "$here/repository" "$work/repository"
chmod -R u+w "$work/repository"
find "$work/repository" -type f \( -name config.pbtxt -o -name '*.yaml' \) -exec \
    sed -i "s|@BUNDLE@|$work/bundle|g" {} +

@part@

[ "${1:-}" != prepare ] || exit 0

"$@" &
child=$!
stopping= timer=
stop() {
    stopping=1
    # mpirun would kill its ranks a second after its own signal: they get theirs first, and end in order.
    ranks=
    [ "$1" != mpirun ] || ranks=$(cat "/proc/$child/task/$child/children" 2> /dev/null || true)
    # shellcheck disable=SC2086
    kill -TERM ${ranks:-$child} 2> /dev/null || true
    if [ -n "$ranks" ] && [ -z "$timer" ]; then
        (
            sleep @patience@ &
            nap=$!
            trap 'kill "$nap"; exit 0' TERM
            wait "$nap"
            kill -TERM "$child" 2> /dev/null || true
        ) &
        timer=$!
    fi
}
trap 'stop "$1"' INT TERM HUP
status=0
while :; do
    wait "$child" && status=0 || status=$?
    kill -0 "$child" 2> /dev/null || break # a signal ends `wait` as well
done
[ -z "$timer" ] || kill -TERM "$timer" 2> /dev/null || true
[ -z "$stopping" ] || status=0
exit "$status"
"""
_EMBEDDED: Final = r"""
[ "${1:-}" = prepare ] || {
    need pipeline
    set -- @command@
}
"""
_TRITON: Final = r"""
PATH=$PATH:/opt/tritonserver/bin:/usr/local/mpi/bin:/opt/hpcx/ompi/bin
export PATH
[ "${1:-}" = prepare ] || {
    need tritonserver
    # Interfaces that no client needs are closed by a header that cannot be sent: its name has a colon.
    closing=
    random=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
    known=$(tritonserver --help 2>&1 || true)
    for option in http-restricted-api grpc-restricted-protocol; do
        case $known in
            *"--$option "*) closing="$closing --$option=@closed@:no:$random=$random" ;;
            *) echo "warning: this Triton has no --$option: keep its ports from strangers" >&2 ;;
        esac
    done
    run_prefix=bundle-$$-$(od -An -N4 -tx1 /dev/urandom | tr -d ' \n')-
    set -- @command@@by_mpirun@
    # MPIRUN_OPTIONS: hosts and how they are reached, for engines over several of them.
    if [ "$1" = mpirun ]; then
        need mpirun
        shift
        # shellcheck disable=SC2086
        set -- mpirun ${MPIRUN_OPTIONS:-} "$@"
    fi
}
"""
_ONE_RANK: Final = r"""
    # A single rank runs without mpirun as well.
    if @wanted@; then
        set -- @mpirun@ "$@"
    fi"""
_SERVE: Final = r"""
PATH=$PATH:/usr/local/mpi/bin:/opt/hpcx/ompi/bin
export PATH
[ "${1:-}" = prepare ] || {
    need trtllm-serve
    if [ -n "${MPIRUN_OPTIONS:-}" ]; then # over several hosts
        need mpirun trtllm-llmapi-launch
        set -- @multi_node@
        shift
        # shellcheck disable=SC2086
        set -- mpirun $MPIRUN_OPTIONS "$@"
    else
        set -- @command@
    fi
}
"""
