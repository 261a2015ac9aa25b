import io

from aimgpu.cli.progress import PlainProgress, show_progress
from aimgpu.units import MIB


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_tell_rate_and_time_left() -> None:
    stream, now = io.StringIO(), [0.0]
    progress = PlainProgress(stream, clock=lambda: now[0])
    for second in range(9):
        now[0] = float(second)
        progress.update_bytes("model", second * 10 * MIB, 80 * MIB)
    assert stream.getvalue().splitlines() == [
        "model: 80MiB",
        "model: 25% of 80MiB, 10MiB/s, 6 s left",
        "model: 50% of 80MiB, 10MiB/s, 4 s left",
        "model: 75% of 80MiB, 10MiB/s, 2 s left",
        "model: 100% of 80MiB, 10MiB/s",
    ]


def test_plain_lines_without_a_total_invent_none() -> None:
    stream = io.StringIO()
    progress = PlainProgress(stream)
    progress.update_bytes("model", 0, None)
    progress.update_bytes("model", MIB, None)
    assert stream.getvalue() == "model: size unknown\n"


def test_plain_state_lines_are_few() -> None:
    stream = io.StringIO()
    progress = PlainProgress(stream)
    progress.update_state("chat", "queued")
    for percent in range(101):
        progress.update_state("chat", "loading", percent)
    progress.update_state("chat", "ready")
    progress.update_state("chat", "ready")
    loading = [f"chat: loading {n}%" for n in (25, 50, 75, 100)]
    assert stream.getvalue().splitlines() == ["chat: queued", "chat: loading", *loading, "chat: ready"]


def test_a_terminal_gets_bars_and_lines_above_them() -> None:
    stream = Terminal()
    with show_progress(stream) as progress:
        progress.update_bytes("model", 10 * MIB, 80 * MIB)
        progress.print_line("a line")
        progress.update_state("chat", "loading", 40)
        progress.update_bytes("model", 80 * MIB, 80 * MIB)
    shown = stream.getvalue()
    assert "80MiB of 80MiB" in shown
    assert "loading 40%" in shown
    assert "a line" in shown


def test_a_pipe_gets_no_control_codes() -> None:
    stream = io.StringIO()
    with show_progress(stream) as progress:
        progress.update_state("chat", "loading", 40)
    assert "\x1b" not in stream.getvalue()
