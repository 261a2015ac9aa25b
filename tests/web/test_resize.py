"""Resizing a share that the interposer holds, from the page."""

from pathlib import Path

from playwright.sync_api import Browser, expect
from tests.daemon.test_held import Stage, built, greedy, instance, stage, start, tenant
from tests.web.browser import needs_chromium, open_page

from aimgpu.units import GIB

__all__ = ["built", "stage"]

pytestmark = needs_chromium


def test_a_share_is_previewed_and_resized_while_its_model_runs(browser: Browser, stage: Stage, tmp_path: Path) -> None:
    daemon = stage.daemon(tmp_path / "home", greedy(stage))
    client = start(daemon)
    found = instance(client)
    assert found is not None
    page = open_page(browser, client.make_link()).page
    page.get_by_role("button", name="More actions for chat").click()
    page.get_by_role("menuitem", name="Resize").click()
    dialog = page.locator("dialog[open]")
    expect(dialog.locator(".notice")).to_contain_text("2 GiB now")
    dialog.get_by_label("Memory for each copy").fill("900")
    expect(dialog.locator(".notice.bad")).to_contain_text("900GiB were asked for")
    expect(dialog.get_by_role("button", name="Resize")).to_be_disabled()
    dialog.get_by_label("Memory for each copy").fill("3")
    expect(dialog.locator(".notice.bad")).to_have_count(0)
    dialog.get_by_role("button", name="Resize").click()
    expect(page.locator("table.models")).to_contain_text("3 GiB")
    assert tenant(daemon, found["id"]).cap_bytes == 3 * GIB
    assert (instance(client) or {})["id"] == found["id"], "nothing was restarted"
    page.context.close()
