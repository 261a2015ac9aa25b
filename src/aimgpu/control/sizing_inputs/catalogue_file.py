"""The models that a user added, in a CSV file of their own beside the package's catalogue."""

from collections.abc import Iterable
from pathlib import Path

from aimgpu.errors import InvalidInput, NotFound
from aimgpu.files import locked, write_private
from aimgpu.sizing import Catalogue, Row, built_in, combine, read_rows, write_rows
from aimgpu.sizing.catalogue import check_against

_LARGEST_FILE = 4 << 20
_HEAD = "# Models added with `aimgpu catalogue`. One model a line; these go before the package's own.\n"


class CatalogueFile:
    """The user's own models in a CSV file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def catalogue(self) -> Catalogue:
        """The package's models and the user's; the user's win."""
        return combine(built_in().rows, self.read())

    def read(self) -> tuple[Row, ...]:
        """The user's rows; a wrong one raises InvalidInput with its line."""
        if not self._path.exists():
            return ()
        return read_catalogue_csv(self._path)

    def add(self, rows: Iterable[Row]) -> None:
        """Add or replace by id; written whole or not at all."""
        new = tuple(rows)
        check_against(built_in(), new)
        with locked(self._path):
            self._write(combine(self.read(), new).rows)

    def remove(self, name: str) -> None:
        """Raises NotFound for a model that was not added here."""
        with locked(self._path):
            known = self.read()
            kept = tuple(row for row in known if row.facts.name.casefold() != name.casefold())
            if len(kept) == len(known):
                raise NotFound(f"{name} was not added here", hint="`aimgpu catalogue list --mine` shows what was.")
            self._write(kept)

    def _write(self, rows: Iterable[Row]) -> None:
        write_private(self._path, _HEAD + write_rows(rows))


def read_catalogue_csv(path: Path) -> tuple[Row, ...]:
    """Rows of a CSV file, all or none."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise InvalidInput(f"{path} is not a file", hint="Give a CSV file with one model a line.")  # a pipe would wait for ever
    try:
        with path.open("rb") as stream:
            data = stream.read(_LARGEST_FILE + 1)
        return tuple(read_rows(data.decode("utf-8", "replace")))
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}", hint="Check the path.") from error
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error.message}", hint=error.hint) from error
