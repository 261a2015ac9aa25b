"""Draws docs/explanation/isolation-h200.svg; `python -m benchmarks.isolation_h200.tables` writes it."""

import math
from pathlib import Path

TARGET = Path(__file__).resolve().parents[2] / "docs" / "explanation" / "isolation-h200.svg"
SETUPS = {
    "time_slicing_1": "driver time-slicing, 1 hog",
    "time_slicing_2": "driver time-slicing, 2 hogs",
    "mps_1": "MPS, 1 hog",
    "mps_40": "MPS, hog at 40 % of threads",
    "gate_signal_1": "gate with the gateway's signal, 1 hog",
    "gate_signal_2": "gate with the gateway's signal, 2 hogs",
}
LEFT, WIDTH, ROW, TOP = 300, 420, 26, 46
MOST = 20.0


def draw(values: dict[str, float]) -> str:
    whole, height = LEFT + WIDTH + 90, TOP + ROW * len(values) + 30
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{whole}" height="{height}" font-family="sans-serif" font-size="13">',
        f'<rect width="{whole}" height="{height}" fill="white"/>',
        '<text x="10" y="20" font-size="15">Critical request, p95, times its time alone (H200; logarithmic)</text>',
    ]
    for tick in (1, 2, 5, 10, 20):
        x = LEFT + position(tick)
        lines.append(f'<line x1="{x:.0f}" y1="{TOP - 10}" x2="{x:.0f}" y2="{height - 24}" stroke="#ccc"/>')
        lines.append(f'<text x="{x:.0f}" y="{height - 8}" text-anchor="middle" fill="#555">{tick}x</text>')
    for number, (label, value) in enumerate(values.items()):
        y = TOP + number * ROW
        color = "#2a7f62" if label.startswith("gate") else "#b5523b"
        bar = max(2.0, position(max(1.0, value)))
        lines.append(f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{label}</text>')
        lines.append(f'<rect x="{LEFT}" y="{y}" width="{bar:.0f}" height="{ROW - 8}" fill="{color}"/>')
        lines.append(f'<text x="{LEFT + bar + 6:.0f}" y="{y + 13}">{value:.2f}</text>')
    return "\n".join([*lines, "</svg>", ""])


def position(value: float) -> float:
    return WIDTH * math.log(value) / math.log(MOST)
