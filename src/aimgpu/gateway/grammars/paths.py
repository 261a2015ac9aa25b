"""How many ways there are to read a text by a grammar, at most.

llama.cpp follows every way at once, and tries every token of its vocabulary on each, so its time per token grows with the
number of ways in which a few characters can be read. Measured with 49,000 tokens: `root ::= ("a"?){100}` costs 0.8 s of CPU per
token, `{300}` blocks the engine for minutes. The bound is never too low: each way may go on with the characters that suit it
best. In a recursive grammar the ways add up over the whole answer, so there the next character has to decide, except within a
rule that leads to no recursion: its ways meet again where it ends.
"""

from collections.abc import Iterable

from aimgpu.gateway.grammars.syntax import Alternatives, Characters, Node, Reference, Repeat, Sequence

MOST_WAYS = 1000  # of reading a short text
MOST_PARTS = 5000  # with all repetitions written out
MOST_FOLLOWERS = 12_000  # pairs of characters that may follow each other
_SHORT = 12  # characters: a long token
_LEVELS = 2  # of recursion that are looked at
_DEEPEST = 60  # rules within rules

_Added = tuple[bool, list[int], list[int]]  # may be empty, may begin with, may end with


class CostlyGrammar(Exception):
    """What is wrong with it, for its author."""


def check_ways(root: Node, rules: dict[str, Node]) -> None:
    """Raises CostlyGrammar."""
    automaton = _Automaton(rules)
    if automaton.measure(root, ()) > MOST_PARTS:
        raise CostlyGrammar(f"has more than {MOST_PARTS} parts, with its repetitions written out")
    _, first, _ = automaton.add(root, ())
    automaton.follow.append(first)  # the beginning is one more place from which ways go on
    groups = [automaton.group(tuple(dict.fromkeys(after))) for after in automaton.follow]
    if automaton.recursive:
        automaton.check_decided(first)
    ways = [1] * len(groups)
    for _ in range(_SHORT):
        before, ways = ways, [max((sum([ways[one] for one in group]) for group in found), default=1) for found in groups]
        if max(ways) > MOST_WAYS:
            raise CostlyGrammar(f"is ambiguous: a short text can be read in more than {MOST_WAYS} ways")
        if ways == before:
            return


class _Automaton:
    """Positions of characters, and which may follow which (Glushkov's construction)."""

    def __init__(self, rules: dict[str, Node]) -> None:
        self.masks: list[int] = []
        self.follow: list[list[int]] = []
        self.recursive = False
        self._rules = rules
        self._regular = _find_regular(rules)
        self._groups: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        self._places: list[int | None] = []  # of each position, the place of the regular rule that it belongs to
        self._place: int | None = None
        self._sizes: dict[str, int] = {}
        self._looked = 0
        self._pairs = 0

    def group(self, after: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Those of these positions that the same character may be, for every character."""
        if after not in self._groups:
            self._groups[after] = [after] if len(after) == 1 else _group(after, self.masks)
        return self._groups[after]

    def check_decided(self, first: list[int]) -> None:
        """Whatever was read, what goes on is one way, or several within one regular rule."""
        known: set[tuple[int, ...]] = set()
        coming = [tuple(dict.fromkeys(first))]
        while coming:
            for group in self.group(coming.pop()):
                places = {self._places[one] for one in group}
                if len(known) > MOST_PARTS or (len(group) > 1 and (len(places) > 1 or None in places)):
                    raise CostlyGrammar("is recursive, and the next character does not always decide how it goes on")
                if group not in known:
                    known.add(group)
                    coming.append(tuple(dict.fromkeys(after for one in group for after in self.follow[one])))

    def measure(self, node: Node, inside: tuple[str, ...]) -> int:
        """How much `add` has to do."""
        match node:
            case Characters():
                return 1
            case Sequence(items) | Alternatives(items):
                return 1 + sum(self.measure(item, inside) for item in items)
            case Repeat(item, least, most):
                return 1 + self.measure(item, inside) * _copies(least, most)
            case Reference(name):
                return 1 + self._measure_rule(name, inside)

    def _measure_rule(self, name: str, inside: tuple[str, ...]) -> int:
        if name not in self._rules:
            raise CostlyGrammar(f"has no rule '{name[:50]}'")
        if name in inside:
            self.recursive = True
            if inside.count(name) >= _LEVELS:
                return 0
        if self.recursive or name not in self._sizes:
            self._looked += 1
            if self._looked > MOST_PARTS or len(inside) > _DEEPEST:
                raise CostlyGrammar("has too many rules within rules")
            self._sizes[name] = self.measure(self._rules[name], (*inside, name))
        return self._sizes[name]

    def add(self, node: Node, inside: tuple[str, ...]) -> _Added:
        """The positions of a part, joined to each other."""
        match node:
            case Characters(mask):
                self.masks.append(mask)
                self.follow.append([])
                self._places.append(self._place)
                position = len(self.masks) - 1
                return False, [position], [position]
            case Sequence(items):
                return self._add_chain(items, len(items), inside)
            case Alternatives(options):
                found = [self.add(option, inside) for option in options]
                first = [one for _, begins, _ in found for one in begins]
                return any(empty for empty, _, _ in found), first, [one for _, _, ends in found for one in ends]
            case Repeat(item, least, most):
                return self._add_chain([item] * _copies(least, most), least, inside, endless=most is None)
            case Reference(name):
                return self._add_rule(name, inside)

    def _add_rule(self, name: str, inside: tuple[str, ...]) -> _Added:
        if inside.count(name) >= _LEVELS:
            return False, [], []
        before = self._place
        if before is None and name in self._regular:
            self._place = len(self.masks)  # no other begins here
        found = self.add(self._rules[name], (*inside, name))
        self._place = before
        return found

    def _add_chain(self, items: Iterable[Node], least: int, inside: tuple[str, ...], *, endless: bool = False) -> _Added:
        """One after another, of which `least` must come and the others may; endless: the last as often as one likes."""
        all_empty = True  # so far
        nullable = True
        first: list[int] = []
        last: list[int] = []
        before: list[int] = []  # may come directly before the next
        begins: list[int] = []
        ends: list[int] = []
        for index, item in enumerate(items):
            empty, begins, ends = self.add(item, inside)
            self._join(before, begins)
            if all_empty:
                first = first + begins
            last = last + ends if empty or index >= least else ends
            before = before + ends if empty else ends
            all_empty = all_empty and empty
            nullable = nullable and (empty or index >= least)
        if endless:
            self._join(ends, begins)
        return nullable, first, last

    def _join(self, before: list[int], after: list[int]) -> None:
        self._pairs += len(before) * len(after)
        if self._pairs > MOST_FOLLOWERS:
            raise CostlyGrammar("is ambiguous: too many of its parts may follow each other")
        for position in before:
            self.follow[position].extend(after)


def _find_regular(rules: dict[str, Node]) -> frozenset[str]:
    """Rules from which no rule can be reached that leads back to itself."""
    regular: set[str] = set()
    uses = {name: _find_references(node) for name, node in rules.items()}
    while found := {name for name, used in uses.items() if name not in regular and used <= regular}:
        regular |= found
    return frozenset(regular)


def _find_references(node: Node) -> set[str]:
    match node:
        case Characters():
            return set()
        case Sequence(items) | Alternatives(items):
            return {name for item in items for name in _find_references(item)}
        case Repeat(item, _, _):
            return _find_references(item)
        case Reference(name):
            return {name}


def _copies(least: int, most: int | None) -> int:
    return max(least, 1) if most is None else most


def _group(after: tuple[int, ...], masks: list[int]) -> list[tuple[int, ...]]:
    """Those that the same character may be, for every character."""
    atoms = [0]
    for mask in {masks[one] for one in after}:
        atoms = [part for atom in atoms for part in (atom & mask, atom & ~mask) if part]
        covered = 0
        for atom in atoms:
            covered |= atom
        if mask & ~covered:
            atoms.append(mask & ~covered)
    return list({tuple([one for one in after if masks[one] & atom]): None for atom in atoms})
