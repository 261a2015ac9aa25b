"""The folder for what can be fetched again."""

import os
from collections.abc import Mapping
from pathlib import Path


def cache_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """AIMGPU_CACHE, else the user's cache folder by the XDG rules."""
    if own := environment.get("AIMGPU_CACHE"):
        return Path(own).expanduser().absolute()
    base = environment.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path("~/.cache").expanduser()) / "aimgpu"
