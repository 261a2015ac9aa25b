"""Every message of the program in one list: errors with their hints, and the reasons of findings.

usage: python tools/messages.py [TEXT]     (TEXT: only those with it)

A line is FILE:LINE, the error's class, the message, and after ` | ` the hint. Values stand as {...}.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ERRORS = {node.name for node in ast.parse((ROOT / "src/aimgpu/errors.py").read_text()).body if isinstance(node, ast.ClassDef)}
TEXTS = ("hint", "page_hint", "text", "summary", "reason")  # keywords that carry words for people


def messages(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        texts = [found for word in node.keywords if word.arg in TEXTS and (found := words(word.value))]
        first = words(node.args[0]) if node.args and name in ERRORS else ""
        if first or (texts and name[:1].isupper()):
            yield f"{path.relative_to(ROOT)}:{node.lineno}: {name}: {' | '.join([first, *texts] if first else texts)}"


def words(node: ast.expr) -> str:
    """The text of a literal, with {...} for each value; empty for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{...}" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return words(node.left) + words(node.right)
    if isinstance(node, ast.IfExp):
        return " / ".join(filter(None, (words(node.body), words(node.orelse))))
    return ""


def main() -> int:
    wanted = " ".join(sys.argv[1:]).lower()
    for path in sorted((ROOT / "src").rglob("*.py")):
        for line in messages(path):
            if wanted in line.lower():
                sys.stdout.write(line.replace("\n", " ") + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
