"""Where an engine answers: chosen before it starts where it cannot choose itself, and kept in its run directory."""

import json
import socket
from contextlib import closing
from pathlib import Path

from aimgpu.errors import EngineFailed
from aimgpu.files import write_private

ENDPOINT_NAME = "endpoint.json"


def choose_port() -> int:
    """A port that is free now. Another program may take it first: the engine then dies, says so, and is started again."""
    with closing(socket.socket()) as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def prepare_run_directory(run_directory: Path, *leftovers: str) -> None:
    """The folder, without what a run before said of itself."""
    run_directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in (ENDPOINT_NAME, *leftovers):
        (run_directory / name).unlink(missing_ok=True)


def write_whole(path: Path, content: object) -> None:
    """Readers see the old content or the new, never half of it."""
    try:
        write_private(path, json.dumps(content))
    except OSError as error:
        raise EngineFailed(f"cannot write {path}: {error.strerror}", hint="Free some disk space.") from error


def write_endpoint(run_directory: Path, port: int) -> str:
    """Record where the engine will listen; returns the URL."""
    url = f"http://127.0.0.1:{port}"
    write_whole(run_directory / ENDPOINT_NAME, {"url": url})
    return url
