"""Write a masked recording of this machine's GPUs, one file a vendor, for tests/recordings and docs/reference/supported.md.

A recorder returns what its vendor's GPUs answer as plain JSON, masked (no serial numbers, UUIDs, host or process names), or
None where there is none; register it in RECORDERS. With `--report`, what somebody's `aimgpu doctor --verify` wrote is taken in
place of this machine, and what passed there is what was checked.
"""

import argparse
import datetime as dt
import json
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from aimgpu.hardware.amd.recording import record_amd
from aimgpu.hardware.nvidia.recording import record_nvidia

FORMAT = 1
CHECKED = {"memory cap": "memory cap", "compute gate": "compute limit", "MPS": "mps", "CU mask": "CU mask"}  # by trial
RECORDERS: dict[str, Callable[[], dict[str, Any] | None]] = {"amd": record_amd, "nvidia": record_nvidia}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("tests/recordings"))
    parser.add_argument("--vendor", choices=sorted(RECORDERS), action="append", help="all, unless given")
    parser.add_argument("--name", help="of the file, after the vendor; default: the first device's name")
    parser.add_argument("--checked", action="append", default=[], help="what was tried on this machine, e.g. mps")
    parser.add_argument("--report", type=Path, help="of `aimgpu doctor --verify`, in place of this machine")
    options = parser.parse_args(arguments)
    checked = tuple(options.checked)
    if options.report is not None:
        written = write_report(json.loads(options.report.read_text(encoding="utf-8")), options.folder, options.name, checked)
    else:
        written = [
            write_recording(recorded, options.folder, options.name, checked)
            for vendor in options.vendor or sorted(RECORDERS)
            if (recorded := RECORDERS[vendor]()) is not None
        ]
    for path in written:
        print(path)
    if not written:
        print("no GPU found to record", file=sys.stderr)
    return 0 if written else 1


def write_report(report: dict[str, Any], folder: Path, name: str | None, checked: tuple[str, ...]) -> list[Path]:
    """The recordings of a report. One of a simulation, or in which something failed, is no evidence."""
    failed = [trial["what"] for trial in report["trials"] if trial["outcome"] == "failed"]
    if not report["real"] or failed:
        raise SystemExit(f"no evidence: {'failed were ' + ', '.join(failed) if failed else 'it ran on a simulation'}")
    passed = {trial["what"] for trial in report["trials"] if trial["outcome"] == "passed"}
    found = [checked_as for what, checked_as in CHECKED.items() if what in passed]
    found += ["partition"] if "restored" in passed and any(what.startswith("mode ") for what in passed) else []
    known = tuple(dict.fromkeys([*checked, *found]))
    day = str(report["date"])[:10]
    return [write_recording(each, folder, name or report["gpus"][0], known, day) for each in report["recordings"]]


def write_recording(
    recorded: dict[str, Any], folder: Path, name: str | None, checked: tuple[str, ...], day: str | None = None
) -> Path:
    """The recording with where it comes from. `checked` says what was exercised beside reading; `day`: today, unless given."""
    head = {
        "format": FORMAT,
        "recorded": day or dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "aimgpu": _version(),
        "checked": ["read", *checked],
    }
    title = name or str(recorded["devices"][0].get("name", "gpu"))
    words = "".join(letter if letter.isalnum() else "-" for letter in title.lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{recorded['vendor']}-{words.removeprefix(recorded['vendor'] + '-')}.json"
    path.write_text(json.dumps({**head, **recorded}, indent=1) + "\n", encoding="utf-8")
    return path


def _version() -> str:
    try:
        return metadata.version("aimgpu")
    except metadata.PackageNotFoundError:  # run from a checkout
        return "source"


if __name__ == "__main__":
    sys.exit(main())
