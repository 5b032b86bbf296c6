"""The tutorial, performed from top to bottom as its reader would, with a little model in place of the real one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import walk
import yaml

from trtllm_pipeline.orchestrate.matrix.recipe_files import recipes_folder
from trtllm_pipeline.tensorrt.servers.triton_server import unused_ports

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "first-hour.md"
NUMBER = re.compile(r"\d[\w.,:%-]*")
"""Numbers, times, ids of runs and fingerprints, which are others each time."""


@pytest.fixture
def clone(tmp_path: Path) -> Iterator[Path]:
    """A directory as the page expects it, where the quickstart's model is a little one made on the spot."""
    walk.prepare(tmp_path)
    little = yaml.safe_load((recipes_folder() / "tiny.yaml").read_text(encoding="utf-8"))
    little |= {"name": "smollm2-135m-instruct", "smoke": {"prompt": "The capital of France is"}}
    (tmp_path / "matrices" / "recipes").mkdir()
    (tmp_path / "matrices" / "recipes" / "smollm2-135m-instruct.yaml").write_text(yaml.safe_dump(little))
    yield tmp_path
    if (tmp_path / ".pipeline" / "serve" / "first").exists():
        walk.perform("pipeline serve stop first", tmp_path)


def test_every_command_works_and_prints_what_the_page_shows(clone: Path) -> None:
    pytest.importorskip("xllamacpp")
    port, performed = str(unused_ports(1)[0]), 0
    for step in walk.steps(PAGE.read_text(encoding="utf-8")):
        output = walk.perform(step.commands.replace("8000", port), clone)
        performed += 1
        if step.output is None:
            continue
        assert step.output.strip(), f"the page shows nothing for\n{step.commands}"
        if "pipeline chat" in step.commands:  # the little model has nothing to say, but says it
            assert output.strip()
        elif step.output.startswith("{"):
            assert json.loads(output).keys() == json.loads(step.output).keys(), step.commands
        else:
            shown, printed = (
                " ".join(NUMBER.sub("N", text.splitlines()[0]).split()) for text in (step.output, walk.shown(output))
            )
            # Which precision is the fastest is measured, and doctor may name a warning after its verdict.
            assert printed.replace("/intN/", "/fpN/").startswith(shown.replace("/intN/", "/fpN/")), step.commands
    assert performed > 10
