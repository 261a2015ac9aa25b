"""What a free share is worth, from the mix of shares that are asked for.

The sizes of the mix are packed onto the fewest partitions as a linear program; the dual of each size is its price, and a free
share is worth the dearest set of sizes that fits into it. Solved by column generation: a knapsack over the steps of a
partition proposes the next pattern. Only the mix is used, never the order in which asks come.
"""

from collections.abc import Mapping
from math import gcd

import numpy as np
import numpy.typing as npt

STEPS = 1000  # a partition in thousandths
UNIT = 1_000_000_000  # score of a whole device
Table = npt.NDArray[np.int64]

_MOST_ROUNDS = 400
_FINEST = 5  # steps; finer prices cost time and change no decision worth the name
_EPSILON = 1e-9


def share_prices(counts: Mapping[int, int]) -> dict[int, float]:
    """Price of each size (in steps, 1..STEPS), a whole partition being 1; `counts` says how often each is asked for."""
    sizes = [size for size in sorted(counts) if counts[size] > 0]
    if not sizes:
        return {}
    unit = max(gcd(STEPS, *sizes), _FINEST)
    weights = np.array([-(-size // unit) for size in sizes])
    capacity = STEPS // unit
    demand = np.array([counts[size] for size in sizes], dtype=float)
    basis = np.diag(capacity // weights).astype(float)  # columns: patterns; at first each size alone
    for _ in range(_MOST_ROUNDS):
        prices = np.linalg.solve(basis.T, np.ones(len(sizes)))
        value, pattern = _best_pattern(prices, weights, capacity)
        if value <= 1 + _EPSILON:
            break
        _enter(basis, pattern, demand)
    return {size: min(max(round(float(price), 6), 0.0), 1.0) for size, price in zip(sizes, prices, strict=True)}


def worth_table(prices: Mapping[int, float]) -> npt.NDArray[np.float64]:
    """Worth of 0..STEPS free steps: the dearest set of sizes that fits."""
    worth = [0.0] * (STEPS + 1)
    priced = [(size, price) for size, price in sorted(prices.items()) if price > 0]
    for free in range(1, STEPS + 1):
        best = worth[free - 1]
        for size, price in priced:
            if size > free:
                break
            best = max(best, worth[free - size] + price)
        worth[free] = best
    return np.array(worth)


def waste_table(counts: Mapping[int, int]) -> npt.NDArray[np.float64]:
    """Free steps that the mean ask of the mix cannot use, as a part of the partition."""
    total = sum(counts.values())
    if not total:
        return np.zeros(STEPS + 1)
    asked = np.zeros(STEPS + 1, dtype=np.int64)
    for size, count in counts.items():
        asked[size] += count
    larger = total - asked.cumsum()  # asks that need more than this number of free steps
    waste: npt.NDArray[np.float64] = np.arange(STEPS + 1) * larger / (STEPS * total)
    return waste


def _best_pattern(
    prices: npt.NDArray[np.float64], weights: npt.NDArray[np.int64], capacity: int
) -> tuple[float, npt.NDArray[np.float64]]:
    """The dearest set of sizes that fits one partition, and how many of each it holds."""
    worth, last = [0.0] * (capacity + 1), [-1] * (capacity + 1)
    priced = [(int(weight), float(price), index) for index, (weight, price) in enumerate(zip(weights, prices, strict=True))]
    for free in range(1, capacity + 1):
        best, choice = worth[free - 1], -1
        for weight, price, index in priced:
            if weight > free:
                break
            if worth[free - weight] + price > best + _EPSILON:
                best, choice = worth[free - weight] + price, index
        worth[free], last[free] = best, choice
    pattern = np.zeros(len(weights))
    free = capacity
    while free > 0:
        if last[free] < 0:
            free -= 1
            continue
        pattern[last[free]] += 1
        free -= int(weights[last[free]])
    return worth[capacity], pattern


def _enter(basis: npt.NDArray[np.float64], pattern: npt.NDArray[np.float64], demand: npt.NDArray[np.float64]) -> None:
    """One simplex step: the pattern takes the place of the column that runs out first."""
    amounts = np.linalg.solve(basis, demand)
    direction = np.linalg.solve(basis, pattern)
    ratios = np.where(direction > _EPSILON, amounts / np.where(direction > _EPSILON, direction, 1), np.inf)
    basis[:, int(ratios.argmin())] = pattern
