"""Pins the sources of recipes: asks each hub for the commit of a branch, and writes it in place of the branch's name.

    python maintenance/pin_recipes.py
    python maintenance/pin_recipes.py recipes/qwen3-8b.yaml --write

Without --write, it only shows what it would write. The exit code is 1 if a hub could not be asked or named no commit.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from trtllm_pipeline.base.errors import PipelineError  # noqa: E402
from trtllm_pipeline.models.hub import hugging_face, modelscope  # noqa: E402

_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_SOURCE: Final = re.compile(
    r"^(?P<head>  - (?P<kind>hugging_face|modelscope): (?P<name>\S+)\n)(?:    revision: (?P<revision>\S+)\n)?",
    re.MULTILINE,
)
_BRANCHES: Final = {"hugging_face": "main", "modelscope": "master"}


def pinned(text: str, problems: list[str]) -> str:
    """The text of a recipe with commits. What a hub does not say is added to `problems`."""

    def line(source: re.Match[str]) -> str:
        kind, name, revision = source["kind"], source["name"], source["revision"] or _BRANCHES[source["kind"]]
        if _COMMIT.fullmatch(revision):
            return source[0]
        try:
            commit = (
                hugging_face.pin(name, revision, offline=False)
                if kind == "hugging_face"
                else modelscope.pin(name, revision, offline=False)[0]
            )
        except PipelineError as error:
            problems.append(error.message)
            return source[0]
        if not _COMMIT.fullmatch(commit):
            problems.append(f"{name}: {kind} names no commit of {revision}")
            return source[0]
        return f"{source['head']}    revision: {commit}\n"

    return _SOURCE.sub(line, text)


def main(words: Sequence[str] | None = None) -> int:
    """The command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", type=Path, metavar="FILE", help="default: all that are shipped")
    parser.add_argument("--write", action="store_true", help="write the commits into the files")
    asked = parser.parse_args(words)
    problems: list[str] = []
    for path in asked.recipes or sorted((ROOT / "recipes").glob("*.yaml")):
        before = path.read_text(encoding="utf-8")
        after = pinned(before, problems)
        for old, new in zip(_SOURCE.finditer(before), _SOURCE.finditer(after), strict=True):
            if old["revision"] != new["revision"]:
                print(f"{path.name}: {new['kind']} {new['name']}: {new['revision']}")
        if asked.write and after != before:
            path.write_text(after, encoding="utf-8")
    for problem in problems:
        print(f"not pinned: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
