"""Follows the orders of the isolation benchmark without a GPU, and writes down when it worked."""

import argparse
import contextlib
import json
import os
import select
import sys
import time
from pathlib import Path
from typing import Any

from aimgpu.isolation.critical_signal import CriticalSignal

REQUEST_SECONDS = 0.002


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("--signal")
    for option in ("--seed", "--pause", "--size"):
        parser.add_argument(option)
    arguments = parser.parse_args()
    say("READY")
    while line := sys.stdin.readline():
        begun = time.monotonic()
        result = work(arguments.kind, arguments.signal, line.split())
        with Path(os.environ["STANDIN_LOG"]).open("a") as log:
            log.write(json.dumps([os.environ["STANDIN_NAME"], begun, time.monotonic()]) + "\n")
        if arguments.kind == "decode":
            say("DONE")
        say(json.dumps({**result, "begun": begun, "ended": time.monotonic()}))


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def work(kind: str, signal: str | None, order: list[str]) -> dict[str, Any]:
    if kind != "decode":
        return hog(order)
    if signal is not None and order[3] == "signal":
        path, _, tenant = signal.partition(":")
        announced: Any = CriticalSignal.open(Path(path), tenant)
    else:
        announced = contextlib.nullcontext()
    for _ in range(5):
        with announced:
            time.sleep(REQUEST_SECONDS)
    return {"starts": [0.0] * 5, "requests": [REQUEST_SECONDS] * 5, "steps": [REQUEST_SECONDS / 10] * 50}


def hog(order: list[str]) -> dict[str, Any]:
    marks = [(time.monotonic(), 0)]
    if order[0] == "RUN":
        say("BEGUN")
    while len(marks) < 5 if order[0] == "GO" else not select.select([sys.stdin], [], [], 0.001)[0]:
        time.sleep(0.001)
        marks.append((time.monotonic(), len(marks)))
    if order[0] == "RUN":
        sys.stdin.readline()
    return {"marks": marks, "units_each": 1}


if __name__ == "__main__":
    main()
