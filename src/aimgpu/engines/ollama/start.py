"""What is started: `ollama serve` in this very process, and a child that brings its model in.

Usage: python -m aimgpu.engines.ollama.start SETTINGS.json
"""

import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aimgpu.files import write_private

STATE_NAME = "model.json"
_POLL_SECONDS = 0.1
_NOT_FOUND = 404


def main(arguments: list[str]) -> int:
    """Start the server, bring the model, then wait for the server to end."""
    settings = json.loads(Path(arguments[0]).read_bytes())
    if os.fork() == 0:
        sys.exit(bring_model(settings))
    program = settings["program"]
    os.execv(program, [program, "serve"])  # noqa: S606 - the engine itself


def bring_model(settings: dict[str, Any]) -> int:
    """Fetch where it is not there, name it, load it, give one token; its progress is in the state file."""
    url, model, alias = settings["url"], settings["model"], settings["alias"]
    state = Path(settings["run_directory"]) / STATE_NAME
    server = os.getppid()
    try:
        while not _listens(url):
            if os.getppid() != server:
                return 1
            time.sleep(_POLL_SECONDS)
        _fetch(url, model, state)
        write_private(state, json.dumps({"state": "loading"}))
        _post(url, "/api/copy", {"source": model, "destination": alias})
        _post(
            url,
            "/api/generate",
            {"model": alias, "prompt": "a", "stream": False, "keep_alive": -1, "options": {"num_predict": 1}},
        )
    except (OSError, ValueError) as error:
        reason = _explain(error)
        sys.stderr.write(f"aimgpu: cannot load {model}: {reason}\n")
        write_private(state, json.dumps({"state": "broken", "reason": reason}))
        return 1
    write_private(state, json.dumps({"state": "loaded", "digest": _loaded_digest(url)}))
    return 0


def _fetch(url: str, model: str, state: Path) -> None:
    try:
        _post(url, "/api/show", {"model": model})
    except urllib.error.HTTPError as error:
        if error.code != _NOT_FOUND:
            raise
        error.close()
    else:
        return
    for event in _stream(url, "/api/pull", {"model": model}):
        if "error" in event:
            raise ValueError(event["error"])
        if event.get("total"):
            percent = int(100 * event.get("completed", 0) // event["total"])
            write_private(state, json.dumps({"state": "fetching", "percent": percent}))


def _loaded_digest(url: str) -> str | None:
    """Of the one model that is loaded."""
    try:
        with urllib.request.urlopen(f"{url}/api/ps", timeout=10) as response:  # noqa: S310 - loopback
            (loaded,) = json.loads(response.read())["models"]
            return str(loaded["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _listens(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/api/version", timeout=2):  # noqa: S310 - loopback
            return True
    except urllib.error.HTTPError as error:
        error.close()
        return False
    except OSError:
        return False


def _post(url: str, path: str, content: dict[str, Any]) -> bytes:
    with urllib.request.urlopen(_request(url, path, content)) as response:  # noqa: S310 - loopback
        return bytes(response.read())


def _stream(url: str, path: str, content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with urllib.request.urlopen(_request(url, path, content)) as response:  # noqa: S310 - loopback
        for line in response:
            yield json.loads(line)


def _request(url: str, path: str, content: dict[str, Any]) -> urllib.request.Request:
    body = json.dumps(content).encode()
    return urllib.request.Request(url + path, data=body, headers={"Content-Type": "application/json"})  # noqa: S310 - loopback


def _explain(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        try:
            with error:
                return str(json.loads(error.read())["error"])
        except (ValueError, KeyError, TypeError):
            return f"HTTP {error.code}"
    return str(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
