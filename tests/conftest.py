"""For all tests: which tier runs (`--tier`), and that programs can get Ctrl-C where pytest was started without it."""

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests import downloads
from tests.cluster.foreign import build_ahead, is_all_built
from tests.examples import load_profile
from tests.tiers import FAST, REST, TEST, WIDE, Tier, rank, tier_of

pytest_plugins = ["tests.cluster.fixtures"]
# The asserts of modules that tests share show what they compared, as those of the tests do; before these are imported.
_ROOMS = (f"tests.{path.name}" for path in Path(__file__).parent.iterdir() if path.is_dir())
pytest.register_assert_rewrite(*(room for room in _ROOMS if room not in sys.modules))
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts its background jobs so; an ignored signal is inherited through exec, a handler is not.
    signal.signal(signal.SIGINT, signal.default_int_handler)

_SHOWN_FILES = 10


def pytest_addoption(parser: pytest.Parser) -> None:
    names = [tier.name.lower() for tier in Tier]
    parser.addoption(
        "--tier",
        choices=names,
        help="what one command runs (tests/tiers.py); by default all but wide",
    )


def chosen_tier(config: pytest.Config) -> Tier | None:
    given: str | None = config.getoption("tier")
    return Tier[given.upper()] if given else None


def pytest_configure(config: pytest.Config) -> None:
    load_profile(only_few=chosen_tier(config) in (FAST, TEST))
    config.pluginmanager.register(downloads)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A module of a later tier is not even imported."""
    last = chosen_tier(config) or REST
    is_module = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if is_module and tier_of(collection_path) > last else None


# Decided once, by the process that starts the workers: all of them must have the tests in the same order.
_BUILT = "AIMGPU_TEST_FOREIGN_BUILT"
os.environ.setdefault(_BUILT, str(int(is_all_built())))
_BUILDER = pytest.StashKey[subprocess.Popen[bytes] | None]()


def pytest_collection_finish(session: pytest.Session) -> None:
    # One of the workers, or the only process.
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0" and not session.config.option.collectonly:
        session.config.stash[_BUILDER] = build_ahead({item.path for item in session.items})


def pytest_unconfigure(config: pytest.Config) -> None:
    builder = config.stash.get(_BUILDER, None)
    if builder is not None:
        builder.terminate()
        builder.wait()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # The longest first, so that the workers end together; the order within a file stays.
    items.sort(key=lambda item: rank(item.path, built=os.environ[_BUILT] == "1"))
    for item in items:
        tier = tier_of(item.path)
        if tier > FAST:
            item.add_marker(pytest.mark.slow)
        if "cluster" in getattr(item, "fixturenames", ()) or item.path.parent.name == "cluster":
            item.add_marker(pytest.mark.cluster)
        if tier == REST or item.get_closest_marker("cluster"):
            item.add_marker(pytest.mark.rest)
    chosen = chosen_tier(config)
    left_out = [item for item in items if chosen is not None and not _runs_in(chosen, item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def _runs_in(tier: Tier, item: pytest.Item) -> bool:
    if tier == WIDE:
        return tier_of(item.path) == WIDE
    is_rest = item.get_closest_marker("rest") is not None
    if tier == REST:
        return is_rest or item.get_closest_marker("hypothesis") is not None
    return not is_rest and (tier == TEST or item.get_closest_marker("slow") is None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Where the time of a whole tier went."""
    if chosen_tier(config) not in (TEST, REST):
        return
    seconds: Counter[str] = Counter()
    parts: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                path = report.nodeid.partition("::")[0]
                seconds[path] += report.duration  # type: ignore[assignment]  # a Counter adds floats
                parts[path.split("/")[1]] += report.duration  # type: ignore[assignment]
    terminalreporter.section(f"slowest {_SHOWN_FILES} files, of {sum(seconds.values()):.0f} worker seconds")
    for name, taken in seconds.most_common(_SHOWN_FILES):
        terminalreporter.line(f"{taken:7.1f} s  {name}")
    terminalreporter.line("by part: " + ", ".join(f"{part} {taken:.0f}" for part, taken in parts.most_common()))
