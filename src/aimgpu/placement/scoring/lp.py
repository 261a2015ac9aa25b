"""A small linear program solver: the bounds that prove how good a plan is need no more."""

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
_EPSILON = 1e-9
_MOST_PIVOTS = 20_000


def maximise(value: Array, rows: Array, limits: Array) -> tuple[Array, Array]:
    """Greatest `value @ x` with `rows @ x <= limits`, x >= 0; `limits` must not be negative.

    Returns x and the price of each row. Bland's rule: slow for thousands of rows, never in a circle.
    """
    count, width = rows.shape
    table = np.zeros((count + 1, width + count + 1))
    table[:count, :width] = rows
    table[:count, width : width + count] = np.eye(count)
    table[:count, -1] = limits
    table[count, :width] = -value
    basis = list(range(width, width + count))
    for _ in range(_MOST_PIVOTS):
        entering = np.flatnonzero(table[count, :-1] < -_EPSILON)
        if not entering.size:
            break
        column = int(entering[0])
        steep = table[:count, column] > _EPSILON
        if not steep.any():
            raise ValueError("the linear program has no limit")
        ratios = np.where(steep, table[:count, -1] / np.where(steep, table[:count, column], 1.0), np.inf)
        ties = np.flatnonzero(ratios <= ratios.min() + _EPSILON)
        row = min(ties.tolist(), key=basis.__getitem__)
        _pivot(table, row, column)
        basis[row] = column
    solution = np.zeros(width + count)
    solution[basis] = table[:count, -1]
    return solution[:width], table[count, width : width + count]


def _pivot(table: Array, row: int, column: int) -> None:
    table[row] /= table[row, column]
    factors = table[:, column].copy()
    factors[row] = 0.0
    table -= np.outer(factors, table[row])
