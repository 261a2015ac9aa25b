"""Puts the libraries that we built into a wheel: `AIMGPU_WHEEL=x86_64 uv build --wheel` (or aarch64).

Without that variable a wheel carries the source alone, which the machine's compiler builds on first use.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# Exact: another compiler makes other bytes. The same version is in uv.lock.
COMPILER = "ziglang==0.17.0"
VARIABLE = "AIMGPU_WHEEL"


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg, unused-ignore]
    """Compiles them into a folder of their own and gives the wheel its platform."""

    def dependencies(self) -> list[str]:
        """The compiler, only where it is used: it takes 100 MB."""
        return [COMPILER] if os.environ.get(VARIABLE) else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the files to a wheel of this platform."""
        machine = os.environ.get(VARIABLE)
        if not machine or version == "editable":
            return
        sys.path.insert(0, str(Path(self.root) / "src"))
        from aimgpu.isolation.prebuilt import FOLDER, build_prebuilt  # noqa: PLC0415 - from the tree that is built

        self._folder = tempfile.TemporaryDirectory()
        made = build_prebuilt(Path(self.root) / "native", Path(self._folder.name), machine)
        build_data["tag"] = f"py3-none-manylinux2014_{machine}"
        build_data["pure_python"] = False
        for path in made:
            build_data["force_include"][str(path)] = f"aimgpu/_native/{FOLDER}/{machine}/{path.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """The folder is not needed any more."""
        del version, build_data, artifact_path
        if hasattr(self, "_folder"):
            self._folder.cleanup()
