"""Which engines rank documents: llama.cpp answers a request for vectors with scores then, so the gateway refuses it.

Whether a model ranks is in its file, which only its pod has. Each engine is asked once, by the ranking of one word.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import aiohttp

from aimgpu.gateway.routes import ServedModel

log = logging.getLogger(__name__)

_ENGINE = "llamacpp"  # vLLM refuses vectors of a ranker itself, and Ollama serves none
_QUESTION = {"query": "a", "documents": ["a"]}
_SECONDS = 30.0
_OK, _UNAVAILABLE = 200, 503
_MOST_BYTES = 64 * 1024  # of an answer: the engine is whatever a namespace runs


class RankingEngines:
    """`changed` is called when another engine is found to rank, or one that did is gone."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._engines: Mapping[str, str] = {}  # URLs by instance
        self._keys: Mapping[str, str] = {}  # by instance
        self._answers: dict[tuple[str, str], bool] = {}  # by instance and URL: addresses of pods are used again
        self._wake = asyncio.Event()

    @property
    def found(self) -> frozenset[str]:
        """Instances that rank, as far as is known."""
        return frozenset(
            instance for (instance, url), ranks in self._answers.items() if ranks and self._engines.get(instance) == url
        )

    def look(self, models: Iterable[ServedModel]) -> None:
        """These are served now; those that are new are asked."""
        backends = [backend for model in models if model.card.engine == _ENGINE for backend in model.backends]
        self._engines = {backend.instance_id: backend.url for backend in backends}
        self._keys = {backend.instance_id: backend.api_key for backend in backends if backend.api_key}
        self._answers = {place: ranks for place, ranks in self._answers.items() if self._engines.get(place[0]) == place[1]}
        if self._unknown():
            self._wake.set()

    async def run(self) -> None:
        """For ever."""
        timeout = aiohttp.ClientTimeout(total=_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                await self._wake.wait()
                self._wake.clear()
                await asyncio.gather(*(self._ask(session, *place) for place in self._unknown()))

    def _unknown(self) -> list[tuple[str, str]]:
        return [place for place in self._engines.items() if place not in self._answers]

    async def _ask(self, session: aiohttp.ClientSession, instance: str, url: str) -> None:
        """One that cannot answer yet is asked again with the next look."""
        try:
            head = {"authorization": f"Bearer {key}"} if (key := self._keys.get(instance)) else {}
            async with session.post(f"{url}/v1/rerank", json=_QUESTION, headers=head, allow_redirects=False) as response:
                if response.status == _UNAVAILABLE:
                    return
                answer = await _read(response) if response.status == _OK else None
        except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError) as error:
            log.info("engine.not_asked", extra={"data": {"instance": instance, "reason": str(error)}})
            return
        ranks = isinstance(answer, dict) and "results" in answer
        self._answers[instance, url] = ranks
        if ranks:
            self._changed()


async def _read(response: aiohttp.ClientResponse) -> Any:  # noqa: ANN401  # JSON
    found = b""
    while part := await response.content.read(_MOST_BYTES + 1 - len(found)):
        found += part
    if len(found) > _MOST_BYTES:
        raise ValueError(f"the answer is longer than {_MOST_BYTES} bytes")
    return json.loads(found)
