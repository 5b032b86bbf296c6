"""A build that runs out of memory until it is small enough, through stand-ins of TensorRT-LLM's programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.helpers.trtllm_runs import Lane, cells
from tests.helpers.waiting import eventually
from tests.standins import faults
from tests.standins.faults import Fault

WORDS = ("--set", "axes.max_batch_size=[16]", "--cells", "tiny/fp16/*", "--until", "build")
ALLOWED = ("--set", "settings.retry.oom.max_num_tokens=halve", "--set", "settings.build.max_num_tokens=4096")


def lane_of(folder: Path, *faults: Fault) -> Lane:
    lane = Lane(folder / "lane", "0.16.0", gpus=1)
    lane.installed.fail("trtllm-build", *faults)
    return lane


def tried(lane: Lane) -> list[int]:
    """max_num_tokens of each start of the builder."""
    return [
        int(each.argv[each.argv.index("--max_num_tokens") + 1]) for each in lane.installed.invocations("trtllm-build")
    ]


def built(lane: Lane) -> dict[str, Any]:
    """The manifest of the only engine."""
    (engine,) = lane.outputs("build")
    assert json.loads((engine / "config.json").read_text())["build_config"]["max_num_tokens"] == 1024
    found: dict[str, Any] = json.loads((engine.parent / "manifest.json").read_text())
    return found


def test_it_is_built_with_less_until_it_works_and_everything_says_so(tmp_path: Path) -> None:
    lane = lane_of(tmp_path, Fault("build_oom", times=None, above=1500))
    (refused,) = lane.run(*WORDS, "--set", "settings.build.max_num_tokens=4096", code=1).values()
    assert (refused["failure"], refused["setting"]) == ("out_of_memory", "settings.build.max_num_tokens=2048")
    assert refused["line"] == 2
    (cell,) = lane.run(*WORDS, *ALLOWED).values()
    words = ["settings.build.max_num_tokens 4096 -> 2048 -> 1024: build ran out of memory"]
    assert (cell["status"], cell["changes"]) == ("done", words)
    assert tried(lane) == [4096, 2048, 1024]  # what is known to fail is not tried again
    changes = built(lane)["provenance"]["changes"]
    assert [(each["old"], each["new"]) for each in changes] == [(4096, 2048), (2048, 1024)]
    status = lane.pipeline("status", "--workspace", str(lane.workspace))
    assert words[0] in status
    (again,) = lane.run(*WORDS, *ALLOWED).values()
    assert (again["status"], again["changes"]) == ("up_to_date", words)
    (planned,) = json.loads(lane.pipeline("plan", *lane.words(*WORDS, *ALLOWED)[1:]))["cells"]
    assert [each["new"] for each in planned["changes"]] == [2048, 1024]


def test_killed_in_the_middle_it_goes_on_where_it_was(tmp_path: Path) -> None:
    lane = lane_of(tmp_path, Fault("build_oom", times=None, above=1500), Fault("hang"))
    process = lane.start(*lane.words(*WORDS, *ALLOWED))
    # Not before the third has started to hang: one that is killed earlier leaves that to the next.
    assert eventually(lambda: faults.left(lane.installed.folder, "trtllm-build", "hang") == 0), process.poll()
    assert tried(lane) == [4096, 2048, 1024]
    lane.kill(process)
    (cell,) = lane.resume().values()
    assert cell["status"] == "done"
    assert tried(lane) == [4096, 2048, 1024, 1024]
    assert len(built(lane)["provenance"]["changes"]) == 2


def test_with_fail_fast_nothing_is_tried_again_and_that_is_said(tmp_path: Path) -> None:
    lane = lane_of(tmp_path, Fault("build_oom", times=None, above=1500))
    process = lane.start(*lane.words(*WORDS, *ALLOWED, "--fail-fast"))
    out, err = process.communicate(timeout=280)
    assert process.returncode == 1, out
    assert "--fail-fast: 1 cell not retried despite settings.retry" in err
    assert tried(lane) == [4096]
    (cell,) = lane.resume().values()
    assert (cell["status"], tried(lane)) == ("done", [4096, 2048, 1024])


def test_a_setting_that_is_an_axis_is_proposed_as_one(tmp_path: Path) -> None:
    lane = lane_of(tmp_path, Fault("build_oom", times=None, above=2500))
    axis = ("--set", "axes.settings.build.max_num_tokens=[4096]")
    (refused,) = lane.run(*WORDS, *axis, code=1).values()
    assert refused["setting"] == "axes.settings.build.max_num_tokens=[2048]"
    out = lane.pipeline("resume", "--workspace", str(lane.workspace), "--format", "json", "--set", refused["setting"])
    assert [cell["status"] for cell in cells(out).values()] == ["done"]
    assert tried(lane) == [4096, 2048]
