"""Downloads that tests need: where one fails, it is one line with the name of the file, however many tests wanted it.

The first test fails with that line instead of a traceback, the others of the run skip and are counted on one line.
"""

import re
from collections.abc import Generator

import pytest

_FAILED = (
    re.compile(r"reading (?P<file>https?://\S+): (?P<reason>[^\n]+)"),  # go, from a proxy
    re.compile(r'(?:Get|Head) "(?P<file>https?://[^"]+)": (?P<reason>[^\n]+)'),  # go, without an answer
    re.compile(r"Failed to fetch (?P<file>https?://\S+)\s+(?P<reason>[^\n]+)"),  # apt
    re.compile(r"Failed to (?:fetch|download):? `(?P<file>[^`]+)`(?:[^\n]*\n\s*(?P<reason>[^\n]+))?"),  # uv
    re.compile(r"(?P<reason>\d{3} [A-Z][\w ]+) - GET (?P<file>https?://\S+)"),  # npm
)


class DownloadFailed(Exception):
    """Not the fault of what is tested."""

    def __init__(self, file: str, reason: str) -> None:
        super().__init__(f"cannot download {file}: {reason}")
        self.file = file


def find_failure(printed: str) -> DownloadFailed | None:
    """What go, apt, uv or npm said of a file that it could not get; None where it failed of something else."""
    for pattern in _FAILED:
        if found := pattern.search(printed):
            return DownloadFailed(found["file"], (found["reason"] or "no reason given").strip())
    return None


def one_line(printed: str) -> str:
    """Why a tool could not install something: for the reason of a skip."""
    failure = find_failure(printed)
    return str(failure) if failure else (printed.strip().splitlines() or ["no reason given"])[-1][:300]


_shown: set[str] = set()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    error = call.excinfo.value if call.excinfo else None
    if isinstance(error, DownloadFailed):
        report.longrepr = str(error)
        report.__dict__["missing_file"] = error.file  # goes with it from a worker
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In each worker and then where their reports come together: a file is reported once."""
    file: str | None = getattr(report, "missing_file", None)
    if not report.failed or file is None:
        return
    if file in _shown:
        report.outcome = "skipped"
        report.longrepr = (__file__, 1, f"Skipped: cannot download {file}")
    _shown.add(file)
