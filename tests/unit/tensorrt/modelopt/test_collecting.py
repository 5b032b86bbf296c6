"""The collector of cycles is kept away, and back afterwards."""

from __future__ import annotations

import gc

import pytest

from trtllm_pipeline.tensorrt.modelopt.quantization_worker import uncollected


@uncollected()
def fail() -> None:
    assert not gc.isenabled()
    with uncollected():
        pass
    assert not gc.isenabled(), "who came first ends it"
    raise ValueError("anything")


def test_nothing_is_collected_meanwhile_and_all_is_as_it_was_afterwards() -> None:
    assert gc.isenabled()
    with pytest.raises(ValueError, match="anything"):
        fail()
    assert gc.isenabled()
