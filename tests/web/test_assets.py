import re
from pathlib import Path

import pytest

from aimgpu.web.assets import POLICY, asset_names, find_asset, join_modules

PAGE = Path(__file__).parent.parent.parent / "src/aimgpu/web/page"
_KIB = 1024


def test_the_whole_page_weighs_less_than_300_kb_compressed_and_needs_two_requests_after_the_html() -> None:
    found = {name: find_asset(name) for name in asset_names()}
    assert sum(len(asset.packed) for asset in found.values() if asset is not None) < 300 * 1000
    html = found["/"]
    assert html is not None
    wanted = re.findall(r'(?:src|href)="(/[^"]+)"', html.body.decode())
    assert [name for name in wanted if name != "/favicon.svg"] == ["/page/app.css", "/page/app.js"]
    assert all(name in found for name in wanted)


def test_no_asset_names_another_origin() -> None:
    for name in asset_names():
        asset = find_asset(name)
        assert asset is not None
        urls = re.findall(r"https?://[^\s\"'`)]+", asset.body.decode())
        assert set(urls) <= {"http://www.w3.org/2000/svg"}, name


def test_the_policy_allows_the_pages_own_files_and_nothing_inline() -> None:
    assert "default-src 'none'" in POLICY
    assert "unsafe" not in POLICY
    html = find_asset("/")
    assert html is not None
    text = html.body.decode()
    assert " style=" not in text
    assert "<style" not in text
    assert not re.search(r"<script(?![^>]*\bsrc=)", text)
    assert not re.search(r"\son\w+=", text)


def test_the_script_never_turns_text_into_markup() -> None:
    script = join_modules(PAGE, "main.js")
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert sink not in script


def test_modules_are_joined_dependencies_first_each_once(tmp_path: Path) -> None:
    (tmp_path / "main.js").write_text('import { a } from "./a.js";\nimport { b } from "./b.js";\na(b);\n')
    (tmp_path / "a.js").write_text('import { b } from "./b.js";\nexport function a() { return b; }\n')
    (tmp_path / "b.js").write_text("export const b = 1;\n")
    text = join_modules(tmp_path, "main.js")
    assert text.index("const b = 1") < text.index("function a()") < text.index("a(b);")
    assert text.count("const b = 1") == 1
    assert "import" not in text
    assert "export" not in text


def test_a_name_that_two_modules_define_is_refused(tmp_path: Path) -> None:
    (tmp_path / "main.js").write_text('import { a } from "./a.js";\nfunction twice() {}\na();\n')
    (tmp_path / "a.js").write_text("export function a() {}\nfunction twice() {}\n")
    with pytest.raises(ValueError, match="both define twice"):
        join_modules(tmp_path, "main.js")


def test_modules_that_import_each_other_are_refused(tmp_path: Path) -> None:
    (tmp_path / "main.js").write_text('import { a } from "./a.js";\na();\n')
    (tmp_path / "a.js").write_text('import { m } from "./main.js";\nexport function a() {}\n')
    with pytest.raises(ValueError, match="import each other"):
        join_modules(tmp_path, "main.js")


def test_every_module_is_part_of_the_page_and_none_is_too_long() -> None:
    script = join_modules(PAGE, "main.js")
    for module in PAGE.glob("*.js"):
        assert f"// {module.name}\n" in script
        assert len(module.read_text().splitlines()) <= 500, module.name
