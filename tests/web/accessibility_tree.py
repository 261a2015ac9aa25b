"""What Chromium hands to a screen reader: the accessibility tree, over the DevTools protocol."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from playwright.sync_api import Page

CONTROLS = frozenset(
    (
        *("button", "checkbox", "combobox", "link", "menuitem", "radio", "searchbox", "slider", "spinbutton", "switch", "tab"),
        *("textbox", "ComboBoxSelect"),
    )
)
NAMED = CONTROLS | {"dialog", "group", "image", "img", "menu", "navigation", "radiogroup", "tablist", "tabpanel"}
_SCROLLABLE = frozenset(
    ("MenuListPopup", "option", "log", "document", "RootWebArea", "main", "generic", "region", "paragraph", "pre")
)


@dataclass(slots=True)
class AccessNode:
    """One node that is not ignored."""

    role: str
    name: str
    properties: dict[str, Any]
    children: list["AccessNode"] = field(default_factory=list)

    def walk(self) -> Iterator["AccessNode"]:
        """This one and all below, in the order in which they are read out."""
        yield self
        for child in self.children:
            yield from child.walk()

    def find(self, *roles: str) -> list["AccessNode"]:
        return [one for one in self.walk() if one.role in roles]


def read_tree(page: Page) -> AccessNode:
    session = page.context.new_cdp_session(page)
    try:
        found: list[dict[str, Any]] = session.send("Accessibility.getFullAXTree")["nodes"]
    finally:
        session.detach()
    by_id = {one["nodeId"]: one for one in found}

    def build(raw: dict[str, Any]) -> list[AccessNode]:
        below = [node for child in raw.get("childIds") or () if child in by_id for node in build(by_id[child])]
        if raw.get("ignored"):
            return below
        properties = {one["name"]: one["value"].get("value") for one in raw.get("properties") or ()}
        return [AccessNode(_text(raw, "role"), _text(raw, "name").strip(), properties, below)]

    (root,) = build(found[0])
    return root


def _text(raw: dict[str, Any], key: str) -> str:
    return str((raw.get(key) or {}).get("value") or "")


def find_problems(tree: AccessNode) -> list[str]:
    """Controls without a name, focus on what is no control, tables whose cells have no header, skipped headings."""
    return [*_nameless(tree), *_focusable(tree), *_tables(tree), *_headings(tree)]


def _nameless(tree: AccessNode) -> Iterator[str]:
    for one in tree.walk():
        if one.role in NAMED and not one.name:
            yield f"{one.role} without a name: {[below.name for below in one.walk()][:4]}"


def _focusable(tree: AccessNode) -> Iterator[str]:
    for one in tree.walk():
        if one.properties.get("focusable") and one.role not in CONTROLS | _SCROLLABLE | {"dialog"}:
            yield f"focus stops at {one.role} {one.name!r}, which is no control"


def _tables(tree: AccessNode) -> Iterator[str]:
    for table in tree.find("table"):
        heads = table.find("columnheader")
        if not all(head.name for head in heads):
            yield f"a column without a name among {[head.name for head in heads]}"
        for row in table.find("row"):
            cells = row.find("cell", "gridcell", "rowheader", "columnheader")
            if len(cells) != len(heads):
                yield f"a row of {len(cells)} cells under {len(heads)} headers: {row.name[:60]}"


def _headings(tree: AccessNode) -> Iterator[str]:
    levels = [int(one.properties.get("level") or 0) for one in tree.find("heading")]
    if levels.count(1) > 1:
        yield f"{levels.count(1)} headings of level 1"
    for before, after in itertools.pairwise(levels):
        if after > before + 1:
            yield f"a heading of level {after} after one of level {before}"
