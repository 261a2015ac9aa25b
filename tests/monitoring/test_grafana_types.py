"""The dashboards against the types that Grafana publishes of itself, by the TypeScript compiler."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.monitoring.dashboards import boards, panels
from tests.node_packages import install_packages

HERE = Path(__file__).parent
_ENUM = re.compile(r"export declare enum (\w+) \{(.*?)\n\}", re.DOTALL)
_VALUE = re.compile(r'=\s*("[^"]*"|-?\d+)')
_IMPORT = 'import type { Dashboard } from "./types/raw/dashboard/x/types.gen";'
_CONFIG = {
    "compilerOptions": {
        "noEmit": True,
        "strict": True,
        "skipLibCheck": True,
        "module": "esnext",
        "moduleResolution": "bundler",
        "paths": {"@grafana/schema": ["./types/index.d.ts"]},
    },
    "files": ["boards.ts"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Grafana's types, with every enum as the values that it has in JSON."""
    installed = install_packages(HERE / "node", "grafana-types")
    folder = tmp_path_factory.mktemp("types")
    shutil.copytree(installed / "node_modules" / "@grafana" / "schema" / "dist" / "types", folder / "types")
    for path in (folder / "types").rglob("*.d.ts"):
        text = path.read_text(encoding="utf-8")
        path.write_text(_ENUM.sub(lambda found: f"export type {found[1]} = {' | '.join(_VALUE.findall(found[2]))};", text))
    (folder / "tsconfig.json").write_text(json.dumps(_CONFIG))
    (folder / "node_modules").symlink_to(installed / "node_modules")
    return folder


def compiled(folder: Path, lines: list[str]) -> str:
    """What the compiler has against it."""
    (folder / "boards.ts").write_text("\n".join(lines))
    command = ["node", "node_modules/typescript/bin/tsc", "--project", "tsconfig.json"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=600).stdout


def test_every_dashboard_and_panel_has_the_types_of_grafana(folder: Path) -> None:
    found = boards()
    kinds = sorted({panel["type"] for board in found for panel in panels(board)} - {"row"})
    names = {kind: kind.replace("-", "") for kind in kinds}
    lines = [_IMPORT]
    lines += [f'import type * as {name} from "./types/raw/composable/{name}/panelcfg/x/types.gen";' for name in names.values()]
    for number, board in enumerate(found):
        lines.append(f"export const board{number}: Dashboard = {json.dumps(board)};")
        for panel in panels(board):
            if panel["type"] in names:
                options = json.dumps(panel.get("options") or {})
                lines.append(f"export const o{number}_{panel['id']}: Partial<{names[panel['type']]}.Options> = {options};")
    assert compiled(folder, lines) == ""


def test_a_wrong_dashboard_would_be_noticed(folder: Path) -> None:
    """The types refuse what Grafana does not know, and values that are none."""
    wrong = {"title": "x", "schemaVersion": "39", "panels": [{"type": "stat", "gridPos": {"x": 0}}]}
    lines = [_IMPORT, f"export const b: Dashboard = {json.dumps(wrong)};"]
    text = compiled(folder, lines)
    assert "Type 'string' is not assignable to type 'number'" in text
    assert "from type 'GridPos'" in text
