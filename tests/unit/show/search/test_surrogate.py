from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from trtllm_pipeline.show.search import surrogate


def test_numbers_are_apart_by_their_logarithms_and_categories_all_alike() -> None:
    cells = [{"batch": batch, "precision": name, "tp": 1} for batch, name in product((1, 4, 16), ("a", "b"))]
    batch, precision = surrogate.distances(cells, [0])
    assert batch[:, 0] == pytest.approx([0, 0, 0.25, 0.25, 1, 1])
    assert precision[:, 0].tolist() == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("values", "apart"),
    [
        ([True, False], [0, 1]),
        (["auto", "fp8"], [0, 1]),
        ([None, 2], [0, 1]),
        (["nan", "1"], [0, 1]),
        ([1, 1.0, "1"], [0, 1, 0]),  # the same number in several ways
        (["0", "0.5", "1"], [0, 0.25, 1]),  # numbers
    ],
)
def test_what_is_no_number_is_a_category(values: list[object], apart: list[float]) -> None:
    (axis,) = surrogate.distances([{"x": value} for value in values], [0])  # type: ignore[dict-item]
    assert axis[:, 0] == pytest.approx(apart)


def test_cells_that_are_all_alike_have_no_axes() -> None:
    assert surrogate.distances([{"x": 1}, {"x": 1}], [0, 1]).tolist() == [[[0, 0], [0, 0]]]


def test_effects_that_add_up_are_known_of_cells_that_were_not_measured() -> None:
    cells = [{"batch": 2**power, "precision": name} for power in range(8) for name in ("a", "b", "c")]
    true = np.array(
        [[0.4 * np.log(cell["batch"]) + {"a": 0.0, "b": 0.5, "c": 0.9}[cell["precision"]]] for cell in cells]
    )  # type: ignore[call-overload]
    measured = [0, 4, 8, 10, 13, 15, 19, 23]
    apart = surrogate.distances(cells, measured)  # type: ignore[arg-type]
    shape = surrogate.fitted(apart[:, measured], true[measured])
    mean, error = surrogate.predicted(shape, apart, measured, true[measured])
    assert np.abs(mean - true).max() < 0.15
    assert error[measured].max() < error.max()
