"""What `make test-wide` leaves of each part: `results/PART.json`, to be committed."""

import json
import os
import platform
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
_GIVEN = ("KUBERNETES", "TIMES", "FUZZ_SECONDS", "SEED", "COUNT")  # variables that a part is made of


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorder:
    """Made when a part begins; the commit is that of this moment."""

    part: str
    commit: str = field(default_factory=lambda: _git("rev-parse", "HEAD"))
    changed: bool = field(default_factory=lambda: bool(_git("status", "--porcelain", "--untracked-files=no", ":!tests/wide")))
    begun: float = field(default_factory=time.monotonic)

    def write(self, *, exit_status: int, found: Mapping[str, object], versions: Mapping[str, str]) -> dict[str, object]:
        """The record, with what the part found and the versions of what it was tried with."""
        record = {
            "part": self.part,
            "command": " ".join(
                [f"{name}={os.environ[name]}" for name in _GIVEN if name in os.environ]
                + ["make test-wide", f"ARGS={self.part}"]
            ),
            "commit": self.commit,
            "changed": self.changed,
            "date": datetime.now(UTC).date().isoformat(),
            "duration_seconds": round(time.monotonic() - self.begun),
            "exit_status": exit_status,
            **found,
            "versions": {"python": platform.python_version(), "kernel": platform.release(), **versions},
        }
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{self.part}.json").write_text(json.dumps(record, indent=2) + "\n")
        return record


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
