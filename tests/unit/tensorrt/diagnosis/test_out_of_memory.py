"""Where the kernel counts what it killed for lack of memory, and what follows from a count."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from trtllm_pipeline.base.errors import FailureClass
from trtllm_pipeline.tensorrt.diagnosis import out_of_memory

OWN = {
    # the layout of the machine -> what /proc/self/cgroup says, and the file of the own group
    "v1": (
        "5:cpu,memory:/docker/ab\n0::/\n",
        "memory/docker/ab/memory.oom_control",
        "oom_kill_disable 0\noom_kill 4\n",
    ),
    "v2": (
        "0::/user.slice/a b.scope\n",
        "top/user.slice/a b.scope/memory.events",
        "oom 9\noom_kill 4\noom_group_kill 1\n",
    ),
    "a container's group is the top": ("0::/\n", "top/memory.events", "oom_kill 4\n"),
    "a container of the first kind sees its own at the top": (
        "5:memory:/x\n",
        "memory/memory.oom_control",
        "oom_kill 4\n",
    ),
}


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of files: nothing counts yet but the machine itself."""
    groups = (("memory", f"{tmp_path}/memory", "memory.oom_control"), ("", f"{tmp_path}/top", "memory.events"))
    monkeypatch.setattr(out_of_memory, "_CGROUPS", groups)
    monkeypatch.setattr(out_of_memory, "OWN_GROUPS", str(tmp_path / "groups"))
    monkeypatch.setattr(out_of_memory, "MACHINE", str(tmp_path / "vmstat"))
    monkeypatch.setattr(out_of_memory, "_MESSAGES", str(tmp_path / "kmsg"))
    (tmp_path / "groups").write_text("0::/\n")
    (tmp_path / "vmstat").write_text("oom_killer 1\noom_kill 7\n")
    return tmp_path


@pytest.mark.parametrize("layout", OWN)
def test_the_own_group_s_count_is_found(system: Path, layout: str) -> None:
    groups, name, text = OWN[layout]
    (system / "groups").write_text(groups)
    (system / name).parent.mkdir(parents=True)
    (system / name).write_text(text)
    found = out_of_memory.counts()
    assert (found.group, found.machine) == ({str(system / name): 4}, {})
    (system / name).write_text(text.replace("oom_kill 4", "oom_kill 5"))
    failure, words, _ = out_of_memory.verdict(found)
    assert failure is FailureClass.OUT_OF_MEMORY
    assert words == f"the kernel killed it for lack of memory (oom_kill in {system / name} went from 4 to 5)"


def test_without_a_group_the_machine_s_count_says_no_more_than_it_knows(system: Path) -> None:
    before = out_of_memory.counts()
    assert (before.group, before.machine) == ({}, {str(system / "vmstat"): 7})
    assert out_of_memory.verdict(before)[0] is FailureClass.BUG
    (system / "vmstat").write_text("oom_kill 8\n")
    failure, words, _ = out_of_memory.verdict(before)
    assert failure is FailureClass.OUT_OF_MEMORY
    assert "a process on this machine" in words


def test_without_any_count_nothing_is_claimed(system: Path) -> None:
    (system / "vmstat").unlink()
    (system / "groups").unlink()
    for before in (out_of_memory.counts(), None):
        failure, words, _ = out_of_memory.verdict(before)
        assert failure is FailureClass.BUG
        assert words == "the kernel has no counter that shows whether it was killed for lack of memory"


def test_the_kernel_s_own_line_is_quoted(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (system / "top").mkdir()
    events = system / "top" / "memory.events"
    events.write_text("oom_kill 0\n")
    before = out_of_memory.counts()
    events.write_text("oom_kill 1\n")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # one record a read, as the kernel's file
    with ours, theirs:
        now_us = int(before.at_s * 1e6)
        line = "Memory cgroup out of memory: Killed process 71 (python3) total-vm:9kB"
        for at_us, text in ((1, "Out of memory: Killed process 1 (old)"), (now_us, line), (now_us, "oom_reaper: done")):
            theirs.send(f"6,1,{at_us},-;{text}\n SUBSYSTEM=x\n".encode())
        ours.setblocking(False)
        monkeypatch.setattr(out_of_memory.os, "open", lambda *_: os.dup(ours.fileno()))
        assert out_of_memory.verdict(before)[1].endswith(f"went from 0 to 1; it says: {line})")


def test_this_machine_can_be_asked() -> None:
    found = out_of_memory.counts()
    assert all(count >= 0 for count in {**found.group, **found.machine}.values())
    assert out_of_memory.verdict(found)[0] is FailureClass.BUG
