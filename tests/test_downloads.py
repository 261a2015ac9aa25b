"""A download that fails is reported once, by the name of the file."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.downloads import find_failure, one_line

ROOT = Path(__file__).resolve().parents[1]
WANTING = """
import pytest
from tests.downloads import DownloadFailed

@pytest.fixture{scope}
def program():
    raise DownloadFailed("https://proxy.example/tool/v1.zip", "403 Forbidden")

@pytest.mark.parametrize("number", range(10))
def test_with_it(program, number):
    pass

def test_without_it():
    pass
"""


@pytest.mark.parametrize(
    ("printed", "line"),
    [
        (
            "go: k8s.io/k@v1.37.2: reading https://proxy.example/k8s.io/k/@v/v1.37.2.zip: 403 Forbidden\n\tserver response: no",
            "cannot download https://proxy.example/k8s.io/k/@v/v1.37.2.zip: 403 Forbidden",
        ),
        (
            'go: a.b/c@v1.0.0: Get "https://proxy.example/a.b/c/@v/v1.0.0.mod": dial tcp: lookup proxy.example: no such host\n',
            "cannot download https://proxy.example/a.b/c/@v/v1.0.0.mod: dial tcp: lookup proxy.example: no such host",
        ),
        (
            "Get:1 http://deb.example sid InRelease\nE: Failed to fetch http://deb.example/e/etcd_3.deb  404  Not Found\nE: X",
            "cannot download http://deb.example/e/etcd_3.deb: 404  Not Found",
        ),
        (
            "error: Failed to fetch: `https://index.example/go.whl`\n  Caused by: HTTP status (403 Forbidden)",
            "cannot download https://index.example/go.whl: Caused by: HTTP status (403 Forbidden)",
        ),
        (
            "npm error code E403\nnpm error 403 403 Forbidden - GET https://registry.example/openai - not allowed\n",
            "cannot download https://registry.example/openai: 403 Forbidden",
        ),
        ("x\nmain.go:3:1: syntax error\n", "main.go:3:1: syntax error"),
        ("", "no reason given"),
    ],
)
def test_what_a_tool_printed_becomes_one_line_with_the_file(printed: str, line: str) -> None:
    assert one_line(printed) == line
    assert (find_failure(printed) is not None) == line.startswith("cannot download")


@pytest.mark.slow
@pytest.mark.parametrize(("scope", "workers"), [('(scope="session")', 0), ("", 0), ("", 2)])
def test_many_tests_that_want_a_file_show_it_once(scope: str, workers: int, tmp_path: Path) -> None:
    (tmp_path / "test_wanting.py").write_text(WANTING.format(scope=scope))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    plugins = ("-p", "xdist", "-p", "tests.downloads")
    command = [sys.executable, "-m", "pytest", "-ra", f"-n{workers}", *plugins, str(tmp_path)]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they take a second to import

    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert "1 passed, 9 skipped, 1 error" in done.stdout
    assert "Traceback" not in done.stdout
    assert done.stdout.count("\ncannot download https://proxy.example/tool/v1.zip: 403 Forbidden\n") == 1
    assert len([line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]) == 1
