"""YAML as a person wrote it: every value knows its line, so that a complaint can name it.

Values are read from the text itself ("0.5", "24GiB"), never through YAML's own numbers and booleans, so nothing is rounded
and a model may be called `on`. Aliases, tags, several documents and deep nesting are refused: a stack file needs none of them.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypeVar

import yaml

from aimgpu.errors import InvalidQuantity, InvalidStackFile

_MOST_CHARACTERS = 1_000_000
_DEEPEST = 8
_WHOLE_NUMBER = re.compile(r"0|[1-9][0-9]*", re.ASCII)
_THOUSANDS = re.compile(r"[1-9][0-9]{0,3}[kK]", re.ASCII)
_MOST_DIGITS = 12
_MAPPING_HINT = "Write `key: value` lines, indented below it."
_NULL_TAG = "tag:yaml.org,2002:null"
_TEXT_TAG = "tag:yaml.org,2002:str"
_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True)
class YamlNode:
    """A value of the file with its place in it."""

    node: yaml.Node
    source: str  # the file's name, for messages
    key: str  # what this is the value of; "" for the whole file
    key_line: int = 1

    @property
    def line(self) -> int:
        """Where the value begins."""
        return int(self.node.start_mark.line) + 1

    def complaint(self, message: str, hint: str | None = None, *, line: int | None = None) -> InvalidStackFile:
        """An error that names the file and the line."""
        return InvalidStackFile(f"{self.source}, line {line or self.line}: {message}", hint=hint)

    @property
    def is_mapping(self) -> bool:
        """Whether it has keys."""
        return isinstance(self.node, yaml.MappingNode)

    def entries(self, expected: str) -> dict[str, "YamlNode"]:
        """A mapping with keys of the user's choice, none twice."""
        if not isinstance(self.node, yaml.MappingNode):
            hint = f"Write `{self.key}: {{model: {self.node.value}}}`." if self._is_model(expected) else _MAPPING_HINT
            raise self.complaint(f"{self._name} must be {expected}, not {self._kind}", hint)
        found: dict[str, YamlNode] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in self.node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise self.complaint("a key must be a plain word", _MAPPING_HINT, line=line)
            key = str(key_node.value)
            if key in found:
                raise self.complaint(
                    f"{_short(key)} is here twice; it was first on line {lines[key]}", "Keep one of them.", line=line
                )
            found[key] = YamlNode(value_node, self.source, key, line)
            lines[key] = line
        return found

    def fields(
        self, known: Iterable[str], expected: str = "a mapping", belongs: Mapping[str, str] | None = None
    ) -> dict[str, "YamlNode"]:
        """A mapping with these keys only; `belongs` says under which key a word that is not a key here belongs."""
        names = list(known)
        found = self.entries(expected)
        for key, value in found.items():
            if key not in names:
                hint = _key_hint(key, value, names, belongs or {})
                raise value.complaint(f"unknown key {_short(key)}{self._within}", hint, line=value.key_line)
        return found

    def items(self) -> list["YamlNode"]:
        """The values of a list; one value that is not a list is a list of itself."""
        if not isinstance(self.node, yaml.SequenceNode):
            return [self]
        if not self.node.value:
            raise self.complaint(f"{self._name} is an empty list", "Leave it out, or name something.")
        return [YamlNode(item, self.source, self.key, self.key_line) for item in self.node.value]

    def text(self, example: str) -> str:
        """One scalar, not empty."""
        if not isinstance(self.node, yaml.ScalarNode):
            raise self.complaint(f"{self._name} must be one value, not {self._kind}", f"For example: {self.key}: {example}")
        text = str(self.node.value).strip()
        if not text or (self.node.tag == _NULL_TAG and self.node.style is None):
            raise self.complaint(f"{self._name} has no value", f"For example: {self.key}: {example}")
        if "\0" in text:
            raise self.complaint(f"{self._name} holds a NUL character", f"For example: {self.key}: {example}")
        try:  # JSON escapes a character beyond U+FFFF as a pair of surrogates, which YAML leaves as two
            return text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError as error:
            reason = f"{self._name} holds half of a surrogate pair, which is no character"
            raise self.complaint(reason, f"For example: {self.key}: {example}") from error

    @property
    def is_text(self) -> bool:
        """Whether YAML reads it as text: not as a number, a truth value or a date, unless it is quoted."""
        return self.node.tag == _TEXT_TAG

    def choice(self, values: Iterable[str]) -> str:
        """One of these words, or a complaint with the nearest."""
        options = [str(value) for value in values]
        text = self.text(options[0])
        if text not in options:
            near = get_close_matches(text.lower(), options, n=1)
            hint = f"Did you mean {near[0]!r}? " if near else ""
            raise self.complaint(f"{self._name} cannot be {_short(text)}", f"{hint}It is one of: {', '.join(options)}.")
        return text

    def whole_number(self, *, most: int, example: str) -> int:
        """From 1 to `most`."""
        text = self.text(example)
        if not _WHOLE_NUMBER.fullmatch(text):
            number = str(int(text[:-1]) * 1024) if _THOUSANDS.fullmatch(text) else re.sub("[,_]", "", text)
            meant = f"Did you mean {number!r}? " if _WHOLE_NUMBER.fullmatch(number) else ""
            hint = f"{meant}For example: {self.key}: {example}"
            raise self.complaint(f"{self._name} must be a whole number, not {_short(text)}", hint)
        if len(text) > _MOST_DIGITS or not 1 <= int(text) <= most:
            raise self.complaint(f"{self._name} cannot be {_short(text, quote=str)}", f"It goes from 1 to {most}.")
        return int(text)

    def quantity(self, parse: Callable[[str], _Number], example: str) -> _Number:
        """What `parse` (of `units`) makes of the text; more than nothing."""
        text = self.text(example)
        try:
            value = parse(text)
        except InvalidQuantity as error:
            raise self.complaint(f"{self._name}: {error.message}", error.hint) from error
        if value <= 0:
            raise self.complaint(f"{self._name} cannot be {_short(text)}", f"For example: {self.key}: {example}")
        return value

    @property
    def _name(self) -> str:
        return repr(self.key) if self.key else "the file"

    def _is_model(self, expected: str) -> bool:
        """Whether the name of a model stands where its entry should be."""
        return isinstance(self.node, yaml.ScalarNode) and bool(self.node.value) and "{model:" in expected

    @property
    def _within(self) -> str:
        return f" in {self.key!r}" if self.key else ""

    @property
    def _kind(self) -> str:
        if isinstance(self.node, yaml.SequenceNode):
            return "a list"
        if isinstance(self.node, yaml.MappingNode):
            return "a mapping"
        return "empty" if self.node.tag == _NULL_TAG else _short(str(self.node.value))


def parse_yaml(text: str, source: str) -> YamlNode:
    """The one document of a file. Raises InvalidStackFile with the line."""
    if len(text) > _MOST_CHARACTERS:
        raise InvalidStackFile(
            f"{source} is too large: {len(text)} characters", hint=f"A stack file has at most {_MOST_CHARACTERS} characters."
        )
    try:
        _refuse_tricks(text, source)
        root = yaml.compose(text, yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        raise _syntax_complaint(error, text, source) from error
    except yaml.YAMLError as error:  # a character that YAML does not allow
        raise InvalidStackFile(f"{source} is not YAML: {error}", hint="Save it as plain UTF-8 text.") from error
    if root is None:
        raise InvalidStackFile(
            f"{source} is empty",
            hint="The smallest is `models: {chat: {model: smollm2}}`; `aimgpu up --example` serves one of three.",
        )
    return YamlNode(root, source, "")


def _refuse_tricks(text: str, source: str) -> None:
    """Look at the events first: they come one by one, before anything is built or nested."""
    depth = documents = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        where = f"{source}, line {event.start_mark.line + 1}"
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise InvalidStackFile(f"{where}: anchors and aliases (& and *) are not allowed", hint="Write the value out.")
        if getattr(event, "tag", None):
            raise InvalidStackFile(f"{where}: tags (!) are not allowed", hint="Quote the value if it begins with '!'.")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.DocumentStartEvent):
            documents += 1
        if depth > _DEEPEST:
            raise InvalidStackFile(f"{where}: nested too deep", hint="A stack file has no more than six levels.")
        if documents > 1:
            raise InvalidStackFile(f"{where}: a second document begins", hint="Keep one stack in one file.")


def _syntax_complaint(error: yaml.MarkedYAMLError, text: str, source: str) -> InvalidStackFile:
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark else 1
    lines = text.splitlines()
    written = lines[line - 1] if line <= len(lines) else ""
    hint = "Check the indentation, the colons and the quotes near this line."
    if "\t" in written:
        hint = "Indent with spaces, not with tabs."
    return InvalidStackFile(f"{source}, line {line}: {error.problem or 'not YAML'}", hint=hint)


def _key_hint(key: str, value: YamlNode, names: list[str], belongs: Mapping[str, str]) -> str:
    if key in belongs:
        line = f"{belongs[key]}: {{{key}: {value.node.value}}}" if isinstance(value.node, yaml.ScalarNode) else ""
        return f"{key!r} belongs under {belongs[key]!r}{f': `{line}`' if line and ':' not in belongs[key] else ''}."
    if "models" in names and value.is_mapping and "model" in value.entries(""):
        return f"{key!r} belongs under 'models': `models: {{{key}: {{model: ...}}}}`."
    near = [f"{key}_p95"] if f"{key}_p95" in names else get_close_matches(key.lower(), names, n=1)
    return (f"Did you mean {near[0]!r}? " if near else "") + f"Known keys: {', '.join(names)}."


def _short(text: str, quote: Callable[[str], str] = repr) -> str:
    most = 40
    return quote(text if len(text) <= most else text[:most] + "...")
