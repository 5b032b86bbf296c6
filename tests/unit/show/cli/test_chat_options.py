from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.conftest import Refused
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.serve.kept.servers import KeptServer, State
from trtllm_pipeline.show.cli import chat


@pytest.fixture
def server(tmp_path: Path) -> KeptServer:
    (tmp_path / "one").mkdir()
    return KeptServer(tmp_path / "one", State.READY, None, None, None)


@pytest.mark.parametrize(
    ("file", "environment", "key"),
    [
        ("# of tests\n\nsecret-key\nanother-key\n", "sk-elsewhere", "secret-key"),
        ("", "sk-elsewhere", "sk-elsewhere"),
        (None, "sk-elsewhere", "sk-elsewhere"),
        (None, None, None),
    ],
)
def test_a_kept_server_gets_a_key_of_its_own_file_where_that_can_be_read(
    server: KeptServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    file: str | None,
    environment: str | None,
    key: str | None,
) -> None:
    keys = tmp_path / "keys.txt"
    if file is not None:
        keys.write_text(file)
    (server.folder / "gateway-config.json").write_text(json.dumps({"api_keys_file": str(keys)}))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    if environment is not None:
        monkeypatch.setenv("OPENAI_API_KEY", environment)
    assert chat._key(server) == key


def test_a_file_of_another_owner_than_the_server_is_not_sent_to_it(
    server: KeptServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("secret-token\n")
    config = server.folder / "gateway-config.json"
    config.write_text(json.dumps({"api_keys_file": str(tmp_path / "token")}))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    own = Path.stat

    def owned(path: Path, **more: Any) -> Any:
        return SimpleNamespace(st_uid=4711) if path == config else own(path, **more)

    monkeypatch.setattr(Path, "stat", owned)
    assert chat._key(server) is None


def test_a_kept_server_without_keys_gets_that_of_the_environment(
    server: KeptServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-elsewhere")
    assert chat._key(server) == "sk-elsewhere"
    (server.folder / "gateway-config.json").write_text('{"api_keys_file": null}')
    assert chat._key(server) == "sk-elsewhere"


def test_a_name_that_is_neither_server_nor_cell_is_told_with_the_servers(
    server: KeptServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    monkeypatch.setattr(chat.servers, "find", lambda _workspace: (server,))
    Store(tmp_path / "w").close()
    assert "(managed servers: one)" in refused("chat", "oen", "--workspace", str(tmp_path / "w"))
    assert "managed servers:" not in refused("chat", "tiny/fp16", "--workspace", str(tmp_path / "w")), (
        "no server is called so"
    )
