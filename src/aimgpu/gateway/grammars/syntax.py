"""Grammars (llama.cpp's GBNF) and regular expressions as one kind of tree.

Only what matters for their cost is kept: characters are sets of ASCII, with one member for everything else.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

OTHER = 128  # stands for every character beyond ASCII
ANYTHING = (1 << (OTHER + 1)) - 1
DEEPEST = 50
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_COUNTS = re.compile(r"\{\s*(\d{1,9})?\s*(,)?\s*(\d{1,9})?\s*\}")
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_GROUP_KIND = re.compile(r"\?(?::|<?[=!]|P?<[A-Za-z_]\w*>)")
_PROPERTY = re.compile(r"\{[^{}]{1,40}\}")
_HEX = {letter: re.compile(rf"[0-9A-Fa-f]{{{digits}}}") for letter, digits in (("x", 2), ("u", 4), ("U", 8))}
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}


class UnreadableGrammar(Exception):
    """It is not written as engines take it, or nested too deep."""


@dataclass(frozen=True, slots=True)
class Characters:
    """One character out of a set."""

    mask: int


@dataclass(frozen=True, slots=True)
class Sequence:
    """One after another; empty: nothing."""

    items: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Alternatives:
    """One of them."""

    options: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Repeat:
    """So many times; `most` None: any number."""

    item: "Node"
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Reference:
    """Another rule."""

    name: str


Node = Characters | Sequence | Alternatives | Repeat | Reference


def mask_of(text: str) -> int:
    """The set of these characters."""
    mask = 0
    for character in text:
        mask |= 1 << min(ord(character), OTHER)
    return mask


_DIGITS = mask_of("0123456789")
_SPACES = mask_of(" \t\r\n\f\v")
_LETTERS = mask_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_WORD = _DIGITS | _LETTERS | mask_of("_") | 1 << OTHER
_CLASSES = {"d": _DIGITS, "s": _SPACES, "w": _WORD}
_CLASSES |= {name.upper(): ANYTHING & ~mask | 1 << OTHER for name, mask in _CLASSES.items()}


def parse_grammar(text: str) -> dict[str, Node]:
    """The rules by name. Raises UnreadableGrammar."""
    reader = _Reader(text)
    rules: dict[str, Node] = {}
    reader.skip(_SPACE_AND_LINES)
    while not reader.at_end:
        name = reader.take(_NAME)
        reader.skip(_SPACE)
        reader.expect("::=")
        reader.skip(_SPACE_AND_LINES)
        rules[name] = _read_choice(reader, _read_grammar_item, 0)
        reader.skip(_SPACE_AND_LINES)
    return rules


def parse_regex(text: str) -> Node:
    """Looking ahead or back is read as a group, as some engines do; whether an engine takes it is not decided here."""
    reader = _Reader(text)
    found = _read_choice(reader, _read_regex_item, 0)
    if not reader.at_end:
        raise UnreadableGrammar
    return found


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    @property
    def at_end(self) -> bool:
        return self.at >= len(self.text)

    @property
    def next(self) -> str:
        return self.text[self.at] if self.at < len(self.text) else ""

    def skip(self, pattern: re.Pattern[str]) -> None:
        found = pattern.match(self.text, self.at)
        self.at = found.end() if found else self.at

    def take(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self.text, self.at)
        if not found:
            raise UnreadableGrammar
        self.at = found.end()
        return found[0]

    def take_any(self) -> str:
        if self.at_end:
            raise UnreadableGrammar
        self.at += 1
        return self.text[self.at - 1]

    def skip_text(self, text: str) -> bool:
        if not self.text.startswith(text, self.at):
            return False
        self.at += len(text)
        return True

    def expect(self, text: str) -> None:
        if not self.skip_text(text):
            raise UnreadableGrammar


_ReadItem = Callable[[_Reader, int], Node | None]


def _read_choice(reader: _Reader, read_item: _ReadItem, depth: int) -> Node:
    if depth > DEEPEST:
        raise UnreadableGrammar
    options = [_read_sequence(reader, read_item, depth)]
    while reader.skip_text("|"):
        options.append(_read_sequence(reader, read_item, depth))
    return options[0] if len(options) == 1 else Alternatives(tuple(options))


def _read_sequence(reader: _Reader, read_item: _ReadItem, depth: int) -> Node:
    items: list[Node] = []
    while (item := read_item(reader, depth)) is not None:
        items.append(item)
    return items[0] if len(items) == 1 else Sequence(tuple(items))


def _read_grammar_item(reader: _Reader, depth: int) -> Node | None:
    """The next item of a sequence; None at its end: of the rule, the group or the option."""
    reader.skip(_SPACE_AND_LINES if depth else _SPACE)
    if not depth and reader.next in {"\r", "\n"}:
        _skip_to_continued_option(reader)
    item: Node
    if reader.next in {"", "|", ")", "\r", "\n"}:
        return None
    if reader.skip_text('"'):
        item = _read_literal(reader)
    elif reader.skip_text("["):
        item = Characters(_read_set(reader))
    elif reader.skip_text("("):
        item = _read_choice(reader, _read_grammar_item, depth + 1)
        reader.expect(")")
    elif reader.skip_text("."):
        item = Characters(ANYTHING)
    else:
        item = Reference(reader.take(_NAME))
    reader.skip(_SPACE_AND_LINES if depth else _SPACE)
    return _read_repeats(reader, item)


def _skip_to_continued_option(reader: _Reader) -> None:
    before = reader.at
    reader.skip(_SPACE_AND_LINES)
    if reader.next != "|":
        reader.at = before


def _read_regex_item(reader: _Reader, depth: int) -> Node | None:
    item: Node
    if reader.next in {"", "|", ")"}:
        return None
    character = reader.take_any()
    if character in {"^", "$"}:
        return Sequence(())
    if character == "(":
        reader.skip(_GROUP_KIND)
        item = _read_choice(reader, _read_regex_item, depth + 1)
        reader.expect(")")
    elif character == "[":
        item = Characters(_read_set(reader))
    elif character == ".":
        item = Characters(ANYTHING)
    elif character == "\\":
        item = Characters(_read_escape(reader))
    else:
        item = Characters(mask_of(character))
    found = _read_repeats(reader, item)
    if found is not item:
        reader.skip_text("?")  # lazy: the same texts
    return found


def _read_repeats(reader: _Reader, item: Node) -> Node:
    for sign, least, most in (("*", 0, None), ("+", 1, None), ("?", 0, 1)):
        if reader.skip_text(sign):
            return Repeat(item, least, most)
    if reader.next == "{":
        found = _COUNTS.match(reader.text, reader.at)
        if not found or not (found[1] or found[3]):
            raise UnreadableGrammar
        reader.at = found.end()
        fewest = int(found[1] or 0)
        largest = int(found[3]) if found[3] else None if found[2] else fewest
        return Repeat(item, fewest, largest)
    return item


def _read_literal(reader: _Reader) -> Node:
    items: list[Node] = []
    while not reader.skip_text('"'):
        character = reader.take_any()
        items.append(Characters(_read_escape(reader) if character == "\\" else mask_of(character)))
    return items[0] if len(items) == 1 else Sequence(tuple(items))


def _read_set(reader: _Reader) -> int:
    negated = reader.skip_text("^")
    mask = 0
    first = True
    while first or reader.next != "]":
        first = False
        low = _read_member(reader)
        if reader.next == "-" and not reader.text.startswith("-]", reader.at):
            reader.take_any()
            high = _read_member(reader)
            least, most = low.bit_length() - 1, high.bit_length() - 1
            mask |= (1 << (most + 1)) - (1 << least) if most >= least else 0
        mask |= low
        if reader.at_end:
            raise UnreadableGrammar
    reader.take_any()
    return ANYTHING & ~mask | 1 << OTHER if negated else mask


def _read_member(reader: _Reader) -> int:
    character = reader.take_any()
    return _read_escape(reader) if character == "\\" else mask_of(character)


def _read_escape(reader: _Reader) -> int:
    character = reader.take_any()
    if character in _CLASSES:
        return _CLASSES[character]
    if character in _HEX:
        digits = reader.take(_HEX[character])
        return 1 << min(int(digits, 16), OTHER)
    if character in {"p", "P"} and _PROPERTY.match(reader.text, reader.at):
        reader.skip(_PROPERTY)
        return ANYTHING
    return mask_of(_CONTROLS.get(character, character))
