"""Image pulls: in the background, one per image for all callers, cancelled when the last caller gives up."""

import contextlib
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aimgpu.engines.launchers.docker_api import DockerApi, Pull
from aimgpu.errors import AimGpuError, EngineFailed

_LOOK_SECONDS = 0.1
_DOWNLOAD_PART = 0.7  # of a layer's way; the rest is unpacking
_ALMOST = 99  # until Docker says that it is done
_DONE = ("Pull complete", "Already exists")
_DOWNLOADED = ("Download complete", "Verifying Checksum")
_BARS = ("Downloading", "Extracting")
_WAYS = {  # what Docker says -> what to do
    r"no space left": "Free space on Docker's disk: docker system prune",
    r"toomanyrequests|rate limit": "This registry limits pulls: wait, or log in first (docker login).",
    r"manifest unknown|manifest for|not found": "There is no such tag: look for one in the registry.",
    r"denied|unauthorized|authentication required|no basic auth": "Log in first (docker login), or ask who owns the image.",
    r"x509|certificate": "Docker does not trust this registry: add its certificate to /etc/docker/certs.d.",
    r"no such host|dial tcp|timeout|refused|unreachable|lookup ": (
        "This registry cannot be reached: look at the network and the proxy of Docker, or bring the image with docker load."
    ),
}


@dataclass(slots=True)
class PullProgress:
    """How far an image is, from the events of its layers. Never falls back."""

    percent: int | None = None
    _parts: dict[str, float] = field(default_factory=dict)  # by layer: how much of its way, 0 to 1
    _sizes: dict[str, int] = field(default_factory=dict)  # by layer, once known

    def note(self, event: Mapping[str, Any]) -> None:
        """Count one line of progress."""
        layer, status = event.get("id"), str(event.get("status") or "")
        if not isinstance(layer, str) or status.startswith("Pulling from"):
            return
        detail = event.get("progressDetail")
        self._parts[layer] = max(self._parts.get(layer, 0.0), self._part(layer, status, detail or {}))
        weights = {name: self._sizes.get(name) or self._usual_size() for name in self._parts}
        part = sum(self._parts[name] * weights[name] for name in self._parts) / sum(weights.values())
        self.percent = max(self.percent or 0, min(_ALMOST, int(100 * part)))

    def _part(self, layer: str, status: str, detail: Mapping[str, Any]) -> float:
        if status in _DONE:
            return 1.0
        if status in _DOWNLOADED:
            return _DOWNLOAD_PART
        current, total = detail.get("current"), detail.get("total")
        if status not in _BARS or not isinstance(current, int) or not isinstance(total, int) or total <= 0:
            return 0.0
        done = min(current / total, 1.0)
        if status == "Extracting":
            return _DOWNLOAD_PART + (1 - _DOWNLOAD_PART) * done
        self._sizes[layer] = total
        return _DOWNLOAD_PART * done

    def _usual_size(self) -> int:
        return max(1, sum(self._sizes.values()) // len(self._sizes)) if self._sizes else 1


@dataclass(slots=True)
class _Running:
    """One pull and those who wait for it."""

    pull: Pull
    progress: PullProgress = field(default_factory=PullProgress)
    words: list[str] = field(default_factory=list)  # what happened, without the bars
    waiting: int = 0
    error: AimGpuError | None = None
    ended: threading.Event = field(default_factory=threading.Event)


class ImagePulls:
    """Pulls in progress, one per image however many callers wait for it."""

    def __init__(self, api: DockerApi) -> None:
        self._api = api
        self._running: dict[str, _Running] = {}
        self._lock = threading.Lock()

    def fetch(self, image: str, report: Callable[[int | None, list[str]], None], give_up: Callable[[], None]) -> None:
        """Returns once the image is here; at once where it is. `report` gets the percent and the words of all that happened.

        `give_up` raises when this caller no longer wants it; the last to leave ends the pull. EngineFailed says what to do.
        """
        if self._api.has_image(image):
            return
        running = self._join(image)
        try:
            while not running.ended.wait(_LOOK_SECONDS):
                give_up()
                report(running.progress.percent, list(running.words))
        finally:
            self._leave(image, running)
        report(running.progress.percent, list(running.words))
        if running.error is not None:
            raise running.error

    def _join(self, image: str) -> _Running:
        with self._lock:
            running = self._running.get(image)
            if running is None:
                running = self._running[image] = _Running(pull=self._api.begin_pull(image))
                threading.Thread(target=self._follow, args=(image, running), name="pull", daemon=True).start()
            running.waiting += 1
            return running

    def _leave(self, image: str, running: _Running) -> None:
        with self._lock:
            running.waiting -= 1
            if running.waiting == 0 and self._running.get(image) is running:
                del self._running[image]
                running.pull.cancel()  # Docker stops a pull whose caller is gone

    def _follow(self, image: str, running: _Running) -> None:
        try:
            for event in running.pull.events():
                if "error" in event:
                    raise EngineFailed(str(event["error"]))
                running.progress.note(event)
                if str(event.get("status")) not in _BARS:
                    running.words.append(" ".join(str(event[name]) for name in ("id", "status") if event.get(name)))
        except AimGpuError as error:
            running.error = explain_refusal(image, error.message)
        finally:
            with self._lock, contextlib.suppress(KeyError):
                if self._running.get(image) is running:
                    del self._running[image]
            running.ended.set()


def explain_refusal(image: str, said: str) -> EngineFailed:
    """What the registry or Docker said, and what to do; both in the message, which is all that a failed instance shows."""
    way = next((way for pattern, way in _WAYS.items() if re.search(pattern, said)), f"Try: docker pull {image}")
    return EngineFailed(f"cannot pull {image}: {said.strip()}. {way}", hint=f"Try: docker pull {image}")
