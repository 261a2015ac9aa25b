"""Write a masked recording of this machine's GPUs, one file a vendor, for tests/recordings and docs/reference/supported.md.

A recorder returns what its vendor's GPUs answer as plain JSON, masked (no serial numbers, UUIDs, host or process names), or
None where there is none; register it in RECORDERS.
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
RECORDERS: dict[str, Callable[[], dict[str, Any] | None]] = {"amd": record_amd, "nvidia": record_nvidia}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("tests/recordings"))
    parser.add_argument("--vendor", choices=sorted(RECORDERS), action="append", help="all, unless given")
    parser.add_argument("--name", help="of the file, after the vendor; default: the first device's name")
    parser.add_argument("--checked", action="append", default=[], help="what was tried on this machine, e.g. mps")
    options = parser.parse_args(arguments)
    written = [
        write_recording(recorded, options.folder, options.name, tuple(options.checked))
        for vendor in options.vendor or sorted(RECORDERS)
        if (recorded := RECORDERS[vendor]()) is not None
    ]
    for path in written:
        print(path)
    if not written:
        print("no GPU found to record", file=sys.stderr)
    return 0 if written else 1


def write_recording(recorded: dict[str, Any], folder: Path, name: str | None, checked: tuple[str, ...]) -> Path:
    """The recording with where it comes from. `checked` says what was exercised beside reading."""
    head = {
        "format": FORMAT,
        "recorded": dt.datetime.now(tz=dt.UTC).date().isoformat(),
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
        return metadata.version("aim-gpu-sharing")
    except metadata.PackageNotFoundError:  # run from a checkout
        return "source"


if __name__ == "__main__":
    sys.exit(main())
