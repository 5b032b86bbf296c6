"""Every parser of what servers send, on broken and lying input: a bounded part of benchmarks/fuzz_wire.py."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks import fuzz_wire
from trtllm_pipeline.measure.client.transport import ProtocolError

INPUTS = 400


@pytest.mark.parametrize("parser", fuzz_wire.PARSERS)
def test_whatever_is_sent_is_read_or_refused(parser: str) -> None:
    faults = {
        number: fault
        for number in range(INPUTS)
        if (fault := fuzz_wire.fault(parser, fuzz_wire.made(parser, 20261122, number)))
    }
    assert not faults


def test_a_parser_at_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(_parts: Sequence[bytes]) -> int:
        raise KeyError("x")

    def spins(_parts: Sequence[bytes]) -> int:
        while True:
            pass

    def refuses(_parts: Sequence[bytes]) -> int:
        raise ProtocolError("no")

    monkeypatch.setattr(fuzz_wire, "CPU_S", 0.02)
    for read, expected in ((raises, "KeyError"), (spins, "TooSlowError"), (lambda _parts: 9, "9 bytes kept of 3")):
        monkeypatch.setitem(fuzz_wire.PARSERS, "bad", (lambda _draw: b"", read))
        assert expected in (fuzz_wire.fault("bad", [b"a", b"bc"]) or "")
    monkeypatch.setitem(fuzz_wire.PARSERS, "good", (lambda _draw: b"", refuses))
    assert fuzz_wire.fault("good", [b"a"]) is None
