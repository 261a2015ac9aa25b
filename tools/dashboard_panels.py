"""What a dashboard is made of, before `tools/dashboards.py` makes Grafana's JSON of it."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    uid: str
    title: str
    description: str
    rows: Sequence[tuple[str, Sequence["Panel"]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    title: str
    queries: Sequence[tuple[str, str]]  # expression and legend
    unit: str = "short"
    kind: str = "timeseries"  # stat | bargauge | table | statushistory
    width: int = 12
    height: int = 8
    text: str = ""
    limits: Sequence[tuple[str, float]] = ()  # colour from this value on
    stacked: bool = False
    most: float | None = None
    columns: Sequence[tuple[str, str]] = ()  # of a table: label and heading
    words: Sequence[tuple[float, str]] = ()  # what values mean
