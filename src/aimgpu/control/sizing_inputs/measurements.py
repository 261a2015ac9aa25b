"""Keeps measured memory in a JSON file, so that later estimates are nearer."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from aimgpu.errors import InvalidInput
from aimgpu.files import write_private
from aimgpu.sizing.correction import Correction, MeasuredKind, Measurement, from_json, kind_of, learn, to_json

_LARGEST_FILE = 16 << 20
_KEPT = 2000  # newest; a correction looks at far fewer


class MeasurementFile:
    """Written whole or not at all; a damaged file is refused, not overwritten."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> tuple[Measurement, ...]:
        """Raises InvalidInput for a file that is damaged."""
        try:
            with self._path.open("rb") as stream:
                data = stream.read(_LARGEST_FILE + 1)
        except FileNotFoundError:
            return ()
        if len(data) > _LARGEST_FILE:
            raise InvalidInput(f"{self._path} is larger than 16 MiB", hint="Remove it; estimates go on without it.")
        try:
            return from_json(json.loads(data))
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"{self._path} is not JSON", hint="Remove it; estimates go on without it.") from error

    def add(self, measurements: Iterable[Measurement]) -> None:
        """Keep these too; the oldest are dropped beyond a bound."""
        self._write((*self.read(), *measurements)[-_KEPT:])

    def forget(self, kind: MeasuredKind) -> int:
        """Undo what was learned of one kind; returns how many measurements that were."""
        return self._forget(lambda one: kind_of(one) == kind)

    def forget_model(self, model: str) -> int:
        """Undo what was learned of one model; returns how many measurements that were."""
        return self._forget(lambda one: one.model == model)

    def corrections(self, kind: MeasuredKind) -> dict[str, Correction]:
        """What was learned of one kind, by term."""
        return learn(self.read(), kind)

    def _forget(self, matches: Callable[[Measurement], bool]) -> int:
        known = self.read()
        kept = tuple(one for one in known if not matches(one))
        if len(kept) != len(known):
            self._write(kept)
        return len(known) - len(kept)

    def _write(self, measurements: tuple[Measurement, ...]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_private(self._path, json.dumps(to_json(measurements)))
