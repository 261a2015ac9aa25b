"""Puts a stand-in for an engine's program where it is found."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def write_llama_server(folder: Path, words: str = "") -> Path:
    """`words`: how it shall behave, see fake_llama_server.py."""
    folder.mkdir(exist_ok=True)
    script = folder / "llama-server"
    command = f'PYTHONPATH={ROOT} exec {sys.executable} -m tests.programs.fake_llama_server "$@"'
    script.write_text(f"#!/bin/sh\nFAKE_LLAMA_SERVER='{words}' {command}\n")
    script.chmod(0o755)
    return script
