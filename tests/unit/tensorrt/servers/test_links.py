"""What a server is started on: the repository's files by links, under paths that nothing misreads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from trtllm_pipeline.models.triton_repository import model_config
from trtllm_pipeline.tensorrt.servers import links

ODD = (
    "a b",
    "it's",
    'a"b',
    "a;b",
    "$(id)",
    "`id`",
    "a(b",
    "a&b",
    "star*",
    "back\\slash",
    "new\nline",
    "ü世",
    "a:b",
    "{a}",
)


def test_a_plain_path_keeps_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "a-b_c.d+e=f@1%"
    folder.mkdir()
    assert links.plain(folder) == folder


@pytest.mark.parametrize("name", ODD)
def test_any_other_path_has_another_name(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    named = links.plain(folder)
    assert named.samefile(folder)
    assert str(named).startswith(f"/proc/{os.getpid()}/fd/")
    (folder / "file").write_text("x")
    assert (named / "file").read_text() == "x"


def test_the_files_of_a_repository_are_links_and_its_folders_are_not(tmp_path: Path) -> None:
    version = tmp_path / "repository" / "m" / "1"
    (version / links.COMPILED).mkdir(parents=True)
    (version / links.COMPILED / "model.cpython-311.pyc").write_bytes(b"torn")
    (version / "model.py").write_text("x = 1\n")
    (tmp_path / "elsewhere").mkdir()
    (version / "linked").symlink_to(tmp_path / "elsewhere")
    for _ in range(2):  # a server may be started again
        links.link_repository(tmp_path / "repository", tmp_path / "links")
    made = tmp_path / "links" / "m" / "1"
    assert not made.is_symlink()
    assert sorted(path.name for path in made.iterdir()) == ["linked", "model.py"]
    assert (made / "model.py").readlink() == version / "model.py"
    assert (made / "linked").readlink() == version / "linked"


@pytest.mark.parametrize("name", ODD)
def test_settings_name_plain_paths_alone(tmp_path: Path, name: str) -> None:
    engine = tmp_path / name
    engine.mkdir()
    model = tmp_path / "repository" / "m"
    (model / "1").mkdir(parents=True)
    config = model_config.parse('name: "m"')
    for key, value in {"engine_dir": str(engine), "absent": "/no such directory", "word": name}.items():
        config.parameters[key].string_value = value
    (model / "config.pbtxt").write_text(model_config.to_text(config))
    (model / "1" / "model.yaml").write_text(yaml.safe_dump({"model": str(engine), "nested": [{"dir": str(engine)}]}))
    links.link_repository(tmp_path / "repository", tmp_path / "links")
    found = model_config.string_parameters(model_config.read(tmp_path / "links" / "m" / "config.pbtxt"))
    assert engine.samefile(found["engine_dir"])
    assert links.plain(Path(found["engine_dir"])) == Path(found["engine_dir"])
    assert (found["absent"], found["word"]) == ("/no such directory", name)
    written = yaml.safe_load((tmp_path / "links" / "m" / "1" / "model.yaml").read_text("ascii"))
    assert engine.samefile(written["model"])
    assert written["model"].startswith("/proc/")
    assert written["nested"][0]["dir"].startswith("/proc/")


def test_settings_without_such_a_path_stay_as_they_are(tmp_path: Path) -> None:
    model = tmp_path / "repository" / "m"
    model.mkdir(parents=True)
    (model / "config.pbtxt").write_text('name: "m" # a comment\nparameters { key: "a" value { string_value: "/ü" } }')
    (tmp_path / "repository" / "broken").mkdir()
    (tmp_path / "repository" / "broken" / "config.pbtxt").write_text("no protobuf")
    links.link_repository(tmp_path / "repository", tmp_path / "links")
    assert all(path.is_symlink() for path in (tmp_path / "links").glob("*/config.pbtxt"))
