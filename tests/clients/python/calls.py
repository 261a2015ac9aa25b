"""Runs the functions that a client's program marks with `@call`, each once, and prints a JSON line for each.

A program is run by the interpreter of the clients' own environment; nothing of this project is importable there.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable

URL = os.environ.get("AIMGPU_CLIENTS_URL", "http://127.0.0.1:8080")
KEY = os.environ.get("AIMGPU_CLIENTS_KEY", "none")
MODEL = "chat"
_CALLS: dict[str, Callable[[], object]] = {}


def call(function: Callable[[], object]) -> Callable[[], object]:
    _CALLS[function.__name__] = function
    return function


def main() -> None:
    for name in sys.argv[1:] or _CALLS:
        try:
            _CALLS[name]()
            line = {"call": name, "error": None}
        except Exception:  # noqa: BLE001  # whatever the client raises is the result
            line = {"call": name, "error": traceback.format_exc(limit=-6)}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
