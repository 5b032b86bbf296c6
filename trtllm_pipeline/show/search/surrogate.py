"""A Gaussian process over the axes of a matrix that predicts unmeasured cells from a few measured ones, with uncertainty.

Numeric axes are ordinal, by their logarithm. All others are categorical. The covariance of two cells is a mixture of a mean
over the axes (additive effects) and a product over them (interactions), with a length scale per axis (Duvenaud, Nickisch,
Rasmussen: Additive Gaussian Processes, 2011). Lengths, mixture and noise maximize the likelihood of the measurements
(Rasmussen, Williams: Gaussian Processes for Machine Learning, 2006, 2.2 and 5.4). Each quantity has one scale with a prior
factor of about `_SPREAD`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Final

from trtllm_pipeline.base import Json

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

_RATES: Final = (0.1, 0.3, 1.0, 3.0, 10.0)
"""Decay of similarity over the full length of an axis."""
_PRODUCT: Final = (0.05, 0.2, 0.5, 1.0)
"""Share of the product in the covariance."""
_NOISE: Final = (1e-3, 1e-2, 5e-2)
"""Share of measurement noise in the variance of the quantity."""
_SPREAD: Final = 0.7
"""Prior standard deviation of a quantity's logarithm over a matrix, weighted like `_PRIOR` cells."""
_PRIOR: Final = 2.0


def distances(cells: Sequence[Mapping[str, Json]], others: Sequence[int]) -> Array:
    """[axes, cells, others]: squared differences from some of the cells along each varying axis.

    Numeric differences are fractions of the axis. Categorical differences are 0 or 1.
    """
    import numpy as np

    chosen = np.array(others, dtype=int)
    per_axis = [np.zeros((len(cells), len(chosen)))]
    for name in dict.fromkeys(name for cell in cells for name in cell):
        values = [cell.get(name) for cell in cells]
        if len(set(map(str, values))) < 2:
            continue
        numbers = _numbers(values)
        if numbers is None or min(numbers) == max(numbers):
            texts = np.array([str(value) for value in values])
            per_axis.append((texts[:, None] != texts[None, chosen]).astype(float))
        else:
            places = np.array(numbers)
            places = (places - places.min()) / (places.max() - places.min())
            per_axis.append((places[:, None] - places[None, chosen]) ** 2)
    return np.array(per_axis[1:] or per_axis)


def _numbers(values: Sequence[Json]) -> list[float] | None:
    """Positions on a numeric axis: logarithms, or the values themselves if one is not positive. None for categories."""
    try:
        numbers = [float(value) for value in values if not isinstance(value, bool)]  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    if len(numbers) < len(values) or not all(map(math.isfinite, numbers)):
        return None
    return [math.log(number) for number in numbers] if min(numbers) > 0 else numbers


@dataclass(frozen=True, slots=True)
class Covariance:
    """A covariance: decay of similarity along each axis, share of the product, and noise."""

    rates: tuple[float, ...]
    product: float = 0.5
    noise: float = 1e-2

    def covariance(self, apart: Array) -> Array:
        """The covariance of cells at distances `apart` [axes, ...]."""
        import numpy as np

        falls = np.exp(-np.array(self.rates)[:, None, None] * apart)
        whole: Array = self.product * falls.prod(axis=0) + (1 - self.product) * falls.mean(axis=0)
        return whole


def fitted(apart: Array, values: Array) -> Covariance:
    """The shape that maximizes the likelihood of `values` [cells, quantities], by coordinate search."""
    best = Covariance((1.0,) * len(apart))
    most = _likelihood(best, apart, values)
    for _ in range(2):
        for axis in range(len(apart)):
            for rate in _RATES:
                rates = (*best.rates[:axis], rate, *best.rates[axis + 1 :])
                shape = Covariance(rates, best.product, best.noise)
                if (likely := _likelihood(shape, apart, values)) > most:
                    best, most = shape, likely
        for share, noise in product(_PRODUCT, _NOISE):
            shape = Covariance(best.rates, share, noise)
            if (likely := _likelihood(shape, apart, values)) > most:
                best, most = shape, likely
    return best


def _likelihood(shape: Covariance, apart: Array, values: Array) -> float:
    import numpy as np

    factor = np.linalg.cholesky(shape.covariance(apart) + shape.noise * np.eye(len(values)))
    white = np.linalg.solve(factor, values - values.mean(axis=0))
    scales = _scales(white)
    return float(-values.shape[1] * np.log(np.diag(factor)).sum() - 0.5 * (len(values) + _PRIOR) * np.log(scales).sum())


def _scales(white: Array) -> Array:
    """Variance of each quantity."""
    scales: Array = ((white**2).sum(axis=0) + _PRIOR * _SPREAD**2) / (len(white) + _PRIOR)
    return scales


def predicted(shape: Covariance, apart: Array, measured: Sequence[int], values: Array) -> tuple[Array, Array]:
    """Mean and standard deviation [cells, quantities] of all cells, given the `values` of the `measured` cells.

    `apart` has the distances [axes, cells, measured].
    """
    import numpy as np

    across = shape.covariance(apart)
    factor = np.linalg.cholesky(across[measured] + shape.noise * np.eye(len(measured)))
    mean = values.mean(axis=0)
    white = np.linalg.solve(factor, values - mean)
    shares = np.linalg.solve(factor, across.T)
    unknown = np.maximum(1.0 - (shares**2).sum(axis=0), 0.0) + shape.noise
    means: Array = shares.T @ white + mean
    return means, np.sqrt(unknown[:, None] * _scales(white))
