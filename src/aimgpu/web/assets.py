"""The page's files: one HTML, one style sheet and one script, made from the modules in `page/`, with nothing from elsewhere.

The modules are plain ES modules of one folder. They are joined into one script, in the order of their imports, by dropping the
import lines and the word `export`: one scope for all, so a name that two modules use for two things fails at once.
"""

import gzip
import hashlib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_PAGE = Path(__file__).parent / "page"
_ENTRY = "main.js"
_IMPORT = re.compile(r'^import\s+(?:\{[^}]*\}\s+from\s+)?"\./([\w-]+\.js)";\n', re.MULTILINE)
_NAME = re.compile(r"^(?:export )?(?:async )?(?:function|const|let|class) (\w+)", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|let|class)\b)", re.MULTILINE)

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
SAFETY_HEADERS = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asset:
    body: bytes
    packed: bytes  # gzip
    media_type: str
    tag: str  # ETag


def asset_names() -> tuple[str, ...]:
    return ("/", "/page/app.css", "/page/app.js", "/favicon.svg")


@cache
def find_asset(path: str) -> Asset | None:
    match path:
        case "/":
            return _asset((_PAGE / "index.html").read_bytes(), "text/html; charset=utf-8")
        case "/page/app.css":
            return _asset((_PAGE / "app.css").read_bytes(), "text/css; charset=utf-8")
        case "/page/app.js":
            return _asset(join_modules(_PAGE, _ENTRY).encode(), "text/javascript; charset=utf-8")
        case "/favicon.svg" | "/favicon.ico":
            return _asset((_PAGE / "favicon.svg").read_bytes(), "image/svg+xml")
        case _:
            return None


def join_modules(folder: Path, entry: str) -> str:
    """One strict script of the entry and everything it imports, each once, dependencies first."""
    order: list[str] = []
    texts: dict[str, str] = {}
    owners: dict[str, str] = {}

    def visit(name: str, above: tuple[str, ...]) -> None:
        if name in above:
            raise ValueError(f"modules import each other: {' -> '.join((*above, name))}")
        if name in texts:
            return
        text = (folder / name).read_text(encoding="utf-8")
        for defined in _NAME.findall(text):
            if owners.setdefault(defined, name) != name:
                raise ValueError(f"{owners[defined]} and {name} both define {defined}")
        texts[name] = _EXPORT.sub("", _IMPORT.sub("", text))
        for needed in _IMPORT.findall(text):
            visit(needed, (*above, name))
        order.append(name)

    visit(entry, ())
    body = "\n".join(f"// {name}\n{texts[name]}" for name in order)
    return f'"use strict";\n(() => {{\n{body}\n}})();\n'


def _asset(body: bytes, media_type: str) -> Asset:
    tag = f'"{hashlib.sha256(body).hexdigest()[:20]}"'
    return Asset(body=body, packed=gzip.compress(body, mtime=0), media_type=media_type, tag=tag)
