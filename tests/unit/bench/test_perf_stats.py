from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trtllm_pipeline.bench.stats import PERCENTILES, summary


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60))
def test_percentiles_are_numpys(samples: list[float]) -> None:
    got = summary(samples, digits=9)
    for share in PERCENTILES:
        assert np.isclose(got[f"p{share}"], np.percentile(samples, share), atol=1e-8)
    assert got["n"] == len(samples)
    assert (got["min"], got["max"]) == (round(min(samples), 9), round(max(samples), 9))


def test_no_samples_give_no_numbers() -> None:
    got = summary([])
    assert got.pop("n") == 0
    assert set(got.values()) == {None}
