"""`python -m tests.simulation --first 1 --count 1000`: schedules by their seeds; `--show SEED` prints one."""

import argparse
import os
import sys
import time

from tests.simulation.schedules import run_schedule


def write(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after that long")
    parser.add_argument("--show", type=int, help="one seed, with what happened")
    given = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is part of a schedule
        os.execve(  # noqa: S606 - itself again
            sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"}
        )
    seeds = [given.show] if given.show is not None else range(given.first, given.first + given.count)
    began, steps, done, failed = time.monotonic(), 0, 0, []
    for seed in seeds:
        outcome = run_schedule(seed)
        steps, done = steps + outcome.steps, done + 1
        if given.show is not None:
            write("\n".join([*outcome.log, f"trace {outcome.trace:x}"]))
        if outcome.problem is not None:
            failed.append(seed)
            write(f"seed {seed}: {outcome.problem}")
        if time.monotonic() - began >= given.seconds:
            break
    took = time.monotonic() - began
    write(f"{done} schedules, {steps} steps, {steps / took:.0f} steps a second, {len(failed)} failed: {failed}")
    sys.exit(bool(failed))
