"""Files of data sets on the Hub, through the real client, from a hub of ours on loopback."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.helpers.fake_hub import FakeHub, Fault, Repository
from trtllm_pipeline.base.errors import DownloadError, FailureClass, UsageError
from trtllm_pipeline.models.hub import dataset_file, hugging_face
from trtllm_pipeline.models.hub.hub_errors import OfflineError

ROWS = b'{"text": "Water boils at 100 degrees."}\n'
NAME = "hub:org/rows/data/train.jsonl"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in list(os.environ):
        if name.startswith(("HF_", "HUGGING")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf-cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    with FakeHub({"datasets/org/rows": Repository({"data/train.jsonl": ROWS})}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


@pytest.mark.seam
def test_a_file_is_fetched_once_and_kept(hub: FakeHub) -> None:
    path = dataset_file.data_file(NAME, Path())
    assert path.read_bytes() == ROWS
    before = fetched(hub)
    assert dataset_file.fetch(f"{NAME}@main") == path
    assert fetched(hub) == before, "what is there is not fetched again"


def fetched(hub: FakeHub) -> int:
    return sum(method == "GET" and path.endswith("train.jsonl") for method, path, _ in hub.requests)


def test_without_the_hub_the_copy_serves(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    path = dataset_file.fetch(NAME)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert dataset_file.fetch(NAME) == path


@pytest.mark.parametrize(
    ("name", "message", "failure"),
    [
        ("hub:org/rows/other.jsonl", "does not have a file other.jsonl", FailureClass.USER),
        ("hub:org/nothing/train.jsonl", "org/nothing", FailureClass.USER),
    ],
)
def test_what_is_not_there(hub: FakeHub, name: str, message: str, failure: FailureClass) -> None:
    with pytest.raises(DownloadError, match=message) as raised:
        dataset_file.fetch(name)
    assert raised.value.failure is failure


def test_a_hub_that_is_not_reached_is_worth_another_try(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _seconds: pytest.fail("it waits"))
    with pytest.raises(DownloadError, match=r"127\.0\.0\.1:9: .*refused") as raised:
        dataset_file.fetch(NAME)
    assert raised.value.failure is FailureClass.TRANSIENT


def test_offline_mode_takes_what_is_there(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    path = dataset_file.fetch(NAME)
    monkeypatch.setattr(hugging_face, "offline_by_environment", lambda: True)
    assert dataset_file.fetch(NAME) == path
    for name in ("hub:org/rows/data/test.jsonl", "hub:org/another"):
        with pytest.raises(OfflineError, match="offline mode forbids requests to") as raised:
            dataset_file.fetch(name)
        assert str(raised.value.hint).endswith("or name a file on this machine")


@pytest.mark.seam
def test_a_broken_answer_is_not_taken_for_the_file(hub: FakeHub) -> None:
    hub.faults.append(Fault("train.jsonl", "drop", after=5))
    assert dataset_file.fetch(NAME).read_bytes() == ROWS


def test_another_form_is_refused() -> None:
    with pytest.raises(UsageError, match="does not name a data set"):
        dataset_file.fetch("hub:rows")


def test_a_data_set_by_its_name_is_its_first_file_of_training_rows(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = hub.repositories["datasets/org/rows"].files
    files |= {"README.md": b"# rows", "data/test.jsonl": b"{}", "data/train-0.csv": b"text\na\n", "data/notes.txt": b""}
    for name in ("hub:org/rows", "hub:org/rows/data", "hub:org/rows@main"):
        assert dataset_file.fetch(name).read_bytes() == ROWS
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert dataset_file.fetch("hub:org/rows").read_bytes() == ROWS, "the copy in the cache serves"
    with pytest.raises(DownloadError, match=r"127\.0\.0\.1:9"):
        dataset_file.fetch("hub:org/another")


@pytest.mark.parametrize("name", ["hub:../..", "hub:-a/b"])
def test_a_name_that_no_data_set_has_is_refused_in_words_offline_too(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(hugging_face, "offline_by_environment", lambda: True)
    with pytest.raises(DownloadError, match="is not a valid"):
        dataset_file.fetch(name)


def test_a_data_set_of_several_wants_a_folder(hub: FakeHub) -> None:
    files = hub.repositories["datasets/org/rows"].files
    files |= {"3.0.0/train-00001-of-00002.parquet": b"PAR2", "3.0.0/train-00000-of-00002.parquet": b"PAR1"}
    with pytest.raises(DownloadError, match=r"has rows in 2 directories: 3\.0\.0, data") as raised:
        dataset_file.fetch("hub:org/rows")
    assert raised.value.hint == "name one: hub:org/rows/3.0.0"
    assert dataset_file.fetch("hub:org/rows/3.0.0").read_bytes() == b"PAR1"
    with pytest.raises(DownloadError, match="nothing of the data set org/rows has no file with rows"):
        dataset_file.fetch("hub:org/rows/nothing")
