"""Tables of the gateway's and the queue's figures, for docs/reference/measurements.md."""

from collections.abc import Iterable
from typing import Any

POLICIES = {
    "fifo": "FIFO",
    "deadline-first": "deadline first",
    "strict": "strict priority",
    "aimgpu": "aimgpu",
    "aimgpu+gate": "aimgpu with the launch gate",
    "alone": "high work alone",
}
GATEWAYS = ("nginx", "aimgpu", "vllm-router", "bare-aiohttp", "litellm")


def replay(figures: dict[str, Any]) -> Iterable[str]:
    yield from _head(
        "policy",
        "high keeps TTFT 2 s: all seeds, worst",
        "medium keeps 5 s, worst",
        "batch tokens, x FIFO, worst",
        "longest wait of low",
    )
    for policy, name in POLICIES.items():
        found = figures[policy]
        high = f"{found['high_attainment_all_seeds']:.1%}, {found['high_attainment']:.1%}"
        if policy == "alone":
            yield f"| {name} | {high} | - | - | - |"
        else:
            goodput = f"{found['batch_goodput_x_fifo']:.2f} | {found['longest_wait_seconds']:.0f} s"
            yield f"| {name} | {high} | {found['medium_attainment']:.0%} | {goodput} |"


def sweep(figures: dict[str, Any]) -> Iterable[str]:
    yield from _head(
        "high work offered, of the GPU",
        "requests judged",
        "FIFO",
        "aimgpu: all seeds, worst",
        "alone: all seeds, worst",
        "batch, x FIFO",
    )
    for share, found in figures["sweep"].items():
        ours, alone = found["aimgpu"], found["alone"]
        cells = [f"{float(share):.0%}", str(ours["high_judged"]), f"{found['fifo']['high_attainment_all_seeds']:.0%}"]
        cells += [f"{each['high_attainment_all_seeds']:.1%}, {each['high_attainment']:.1%}" for each in (ours, alone)]
        yield f"| {' | '.join(cells)} | {ours['batch_goodput_x_fifo']:.2f} |"


def live(figures: dict[str, Any]) -> Iterable[str]:
    yield from _head(
        "policy", "high requests judged", "keep their TTFT", "batch tokens, x FIFO", "longest wait of low", "recalls"
    )
    for policy in ("fifo", "deadline-first", "strict", "aimgpu", "alone"):
        if policy in figures and "high_judged" in figures[policy]:
            found = figures[policy]
            cells = [POLICIES[policy], str(found["high_judged"]), f"{found['high_attainment']:.1%}"]
            cells += [
                f"{found['batch_goodput_x_fifo']:.2f}",
                f"{found['longest_low_wait_seconds']:.0f} s",
                str(found["recalls"]),
            ]
            yield f"| {' | '.join(cells)} |"


def gateway(figures: dict[str, Any]) -> Iterable[str]:
    yield from _head(
        "",
        "JSON, 1 caller: added p50",
        "JSON, 16: requests/s",
        "JSON, 16: CPU",
        "JSON, 64: requests/s",
        "50-chunk streams, 16: streams/s",
        "memory, MB",
    )
    for name in GATEWAYS:
        if name in figures:
            found = figures[name]
            cells = [name, f"{found['json_1']['added_p50_ms']:.2f} ms", _round(found["json_16"]["requests_per_second"])]
            cells += [f"{found['json_16']['cpu_us_per_request']:.0f} us", _round(found["json_64"]["requests_per_second"])]
            cells += [_round(found["stream_16"]["requests_per_second"]), f"{found['rss_mb']:.0f}"]
            yield f"| {' | '.join(cells)} |"


def first_byte(figures: dict[str, Any]) -> Iterable[str]:
    cases = [case for case in ("stream_16", "stream_64", "offered_64", "paced_16", "paced_64") if case in figures["aimgpu"]]
    yield from _head("first byte, ms", *(case.replace("_", ", ") for case in cases))
    for name in ("direct", *GATEWAYS):
        if name in figures:
            cells = [f"{figures[name][case]['first_byte_ms']:.2f}" for case in cases]
            yield f"| {name} | {' | '.join(cells)} |"


def _head(*columns: str) -> Iterable[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"| {' | '.join('---' for _ in columns)} |"


def _round(value: float) -> str:
    return f"{value:,.0f}".replace(",", " ")
