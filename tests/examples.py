"""How many examples a property is tried with: a seeded few in `make test`, all in `make test-rest`, new ones in `make fuzz`."""

import os

from hypothesis import HealthCheck, settings

TIMES = int(os.environ.get("AIMGPU_FUZZ", "1"))
USUAL = 100
# Nothing that depends on how loaded the machine is; fixtures that examples share are folders that each leaves as it was.
_ANY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
_few = False


def examples(count: int) -> int:
    return few(count) if _few and TIMES == 1 else count * TIMES


def few(count: int) -> int:
    """A tenth, and at least five."""
    return min(count, max(5, count // 10))


def load_profile(*, only_few: bool) -> None:
    """Called before test modules are imported, whose decorators ask for their numbers."""
    global _few  # noqa: PLW0603 - what the command line of the run says
    _few = only_few
    settings.register_profile("same", _ANY, derandomize=True, max_examples=examples(USUAL))
    settings.register_profile("fuzz", _ANY, max_examples=examples(USUAL), print_blob=True)
    settings.load_profile("fuzz" if TIMES > 1 else "same")
