"""Which package indexes and folders the user configured for pip and uv."""

import configparser
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

DEFAULT_INDEX = "https://pypi.org/simple"
_PIP_SECTIONS = ("install", "download", "global")


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSettings:
    indexes: tuple[str, ...]  # most wanted first
    folders: tuple[Path, ...]  # may hold the wheel itself
    certificates: Path | None


def read_index_settings(environment: Mapping[str, str] = os.environ) -> IndexSettings:
    """Settings of uv before those of pip, the environment before files; pypi.org only where no index was configured."""
    pip = _read_pip_files(environment)
    uv_indexes, uv_folders = _read_uv_file(environment)
    default = [environment.get("UV_DEFAULT_INDEX"), environment.get("UV_INDEX_URL"), environment.get("PIP_INDEX_URL")]
    extra = " ".join(environment.get(name, "") for name in ("UV_INDEX", "UV_EXTRA_INDEX_URL", "PIP_EXTRA_INDEX_URL")).split()
    main = next((url for url in (*default, *uv_indexes, pip.get("index-url")) if url), None)
    more = [*(url.split("=", 1)[-1] if "://" in url.split("=", 1)[-1] else url for url in extra), *uv_indexes]
    more += pip.get("extra-index-url", "").split()
    folders = " ".join(environment.get(name, "").replace(",", " ") for name in ("UV_FIND_LINKS", "PIP_FIND_LINKS")).split()
    folders += [*uv_folders, *pip.get("find-links", "").split()]
    certificates = next(
        (environment[name] for name in ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE") if environment.get(name)),
        pip.get("cert"),
    )
    urls = dict.fromkeys(url.rstrip("/") for url in (main or DEFAULT_INDEX, *more) if url.startswith(("https://", "http://")))
    return IndexSettings(
        indexes=tuple(urls),
        folders=tuple(
            Path(folder.removeprefix("file://")).expanduser()
            for folder in folders
            if "://" not in folder.removeprefix("file://")
        ),
        certificates=Path(certificates) if certificates else None,
    )


def _read_pip_files(environment: Mapping[str, str]) -> dict[str, str]:
    """The files of pip, the strongest last, as its documentation orders them."""
    found: dict[str, str] = {}
    if environment.get("PIP_CONFIG_FILE") == os.devnull:
        return found
    for path in _pip_files(environment):
        parser = configparser.RawConfigParser()
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, OSError, UnicodeDecodeError):
            continue
        for section in reversed(_PIP_SECTIONS):
            if parser.has_section(section):
                found.update({name.replace("_", "-"): value for name, value in parser.items(section)})
    return found


def _pip_files(environment: Mapping[str, str]) -> Iterator[Path]:
    home = Path(environment.get("HOME", "/nonexistent"))
    yield Path("/etc/pip.conf")
    yield home / ".pip/pip.conf"
    yield Path(environment.get("XDG_CONFIG_HOME") or home / ".config") / "pip/pip.conf"
    if environment.get("VIRTUAL_ENV"):
        yield Path(environment["VIRTUAL_ENV"]) / "pip.conf"
    if environment.get("PIP_CONFIG_FILE"):
        yield Path(environment["PIP_CONFIG_FILE"])


def _read_uv_file(environment: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Indexes (the default one first) and folders of the user's uv.toml."""
    home = Path(environment.get("HOME", "/nonexistent"))
    path = Path(
        environment.get("UV_CONFIG_FILE") or Path(environment.get("XDG_CONFIG_HOME") or home / ".config") / "uv/uv.toml"
    )
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return [], []
    indexes = [one for one in content.get("index", []) if isinstance(one, dict) and isinstance(one.get("url"), str)]
    indexes.sort(key=lambda one: not one.get("default", False))
    urls = [content["index-url"]] if isinstance(content.get("index-url"), str) else []
    folders = [folder for folder in content.get("find-links", []) if isinstance(folder, str)]
    return [*urls, *(one["url"] for one in indexes)], folders
