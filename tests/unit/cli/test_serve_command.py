from __future__ import annotations

import json
from pathlib import Path

import pytest

from trtllm_pipeline.cli import app
from trtllm_pipeline.hosting.servers import KeptRecord, State, find, folder_of


@pytest.mark.parametrize("remove", [False, True])
def test_stop_says_as_json_what_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str], remove: bool) -> None:
    for name in ("one", "two"):
        folder = folder_of(tmp_path, name)
        folder.mkdir(parents=True)
        record = KeptRecord(toolchain="embedded", model="tiny", state=State.FAILED, since_s=1.0, started_s=1.0)
        record.write(folder)
    words = ["serve", "stop", "--all", "--workspace", str(tmp_path), "--format", "json"]
    assert app.main([*words, "--remove"] if remove else words) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(each["name"], each["state"]) for each in told["servers"]] == [("one", "failed"), ("two", "failed")]
    assert [each.name for each in find(tmp_path)] == ([] if remove else ["one", "two"])
