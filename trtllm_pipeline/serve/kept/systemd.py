"""A systemd unit that runs the keeper of a server, so that it starts with the machine."""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from trtllm_pipeline.base import probe
from trtllm_pipeline.serve.kept.servers import KeptRecord

PREFIX: Final = "trtllm-pipeline-"
MARK: Final = "# Written by `pipeline serve install`; it writes this file again.\n"
PASSED_ON: Final = (
    *("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "CUDA_HOME", probe.EXAMPLES_VARIABLE, probe.TEMPLATES_VARIABLE),
    "TRTLLM_NO_USAGE_STATS",
)
"""Environment variables that are needed to find and start a server. Others are not written: the environment may contain
secrets.
"""
_STOP_S: Final = 60
_AGAIN_S: Final = 10


def unit_name(name: str) -> str:
    return f"{PREFIX}{name}.service"


def default_path(name: str, *, system: bool) -> Path:
    """The directory where systemd looks for the unit."""
    if system:
        return Path("/etc/systemd/system") / unit_name(name)
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return home / "systemd" / "user" / unit_name(name)


def unit(folder: Path, record: KeptRecord, *, system: bool, environment: Mapping[str, str]) -> str:
    """The text of the unit for the managed server in `folder`.

    `system`: for the machine's systemd, run as the directory's owner; otherwise for that user's systemd.
    """
    about = record.cell or record.served_folder or ""
    owner = pwd.getpwuid(folder.stat().st_uid)
    passed = {name: environment[name] for name in PASSED_ON if environment.get(name)}
    if system:
        # GPU leases of this user's runs are there; see orchestrate/store/claims.py.
        passed["XDG_RUNTIME_DIR"] = f"/run/user/{owner.pw_uid}"
    lines = [
        "[Unit]",
        f"Description=trtllm-pipeline: {_specifiers(folder.name)} ({_specifiers(about)})",
        *(("After=network-online.target", "Wants=network-online.target") if system else ()),
        "",
        "[Service]",
        "Type=exec",
        *((f"User={owner.pw_name}",) if system else ()),
        *(f"Environment={_quoted(f'{name}={value}')}" for name, value in passed.items()),
        "ExecStart=" + " ".join(_argument(word) for word in (sys.executable, "-m", _KEEPER, str(folder))),
        f"Restart={'on-failure' if record.restart else 'no'}",
        f"RestartSec={_AGAIN_S}",
        "# The keeper ends its server in order; what is left then is killed.",
        "KillMode=mixed",
        f"TimeoutStopSec={_STOP_S}",
        "LimitNOFILE=65536",
        "",
        "[Install]",
        f"WantedBy={'multi-user' if system else 'default'}.target",
    ]
    return MARK + "".join(f"{line}\n" for line in lines)


_KEEPER: Final = "trtllm_pipeline.serve.kept.keeper"


def next_steps(path: Path, name: str, *, system: bool, running: bool) -> list[str]:
    """The commands to run after the unit is written."""
    control = "sudo systemctl" if system else "systemctl --user"
    known = path == default_path(name, system=system)
    linger = "loginctl enable-linger    # so that it starts before you log in, and stays after you log out"
    return [
        *([f"pipeline serve stop {name}"] if running else []),
        f"{control} daemon-reload" if known else f"{control} link {path}",
        f"{control} enable --now {path.name}",
        *([] if system else [linger]),
    ]


def _specifiers(text: str) -> str:
    """`text` for one line of systemd: a single line, with % escaped."""
    return " ".join(text.split()).replace("%", "%%")


def _quoted(word: str) -> str:
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("%", "%%")
    return f'"{escaped}"'


def _argument(word: str) -> str:
    """One command-line argument, with $ escaped: it starts a variable there."""
    return _quoted(word).replace("$", "$$")
