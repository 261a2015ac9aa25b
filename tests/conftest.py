"""For all tests: what property tests try, and that programs can get Ctrl-C where the runner itself was started without it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from tests.cluster.foreign import build_ahead, is_all_built
from tests.examples import TIMES, examples
from tests.tiers import is_slow, rank

pytest_plugins = ["tests.cluster.fixtures"]
# The asserts of modules that tests share show what they compared, as those of the tests do; before these are imported.
_ROOMS = (f"tests.{path.name}" for path in Path(__file__).parent.iterdir() if path.is_dir())
pytest.register_assert_rewrite(*(room for room in _ROOMS if room not in sys.modules))
# Real vLLM and Ollama: gigabytes to install and minutes to start. `make test-engines` runs them.
collect_ignore = [] if os.environ.get("AIMGPU_TEST_ENGINES") else ["engines_real"]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts its background jobs so; an ignored signal is inherited through exec, a handler is not.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Nothing that depends on how loaded the machine is; fixtures that examples share are folders that each leaves as it was.
_ANY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
settings.register_profile("same", _ANY, derandomize=True)
settings.register_profile("fuzz", _ANY, max_examples=examples(100), print_blob=True)
settings.load_profile("fuzz" if TIMES > 1 else "same")


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The longest first, so that the workers end together; the order within a file stays.
    items.sort(key=lambda item: rank(item.path, built=os.environ[_BUILT] == "1"))
    for item in items:
        if is_slow(item.path):
            item.add_marker(pytest.mark.slow)
        if "cluster" in getattr(item, "fixturenames", ()) or item.path.parent.name == "cluster":
            item.add_marker(pytest.mark.cluster)
