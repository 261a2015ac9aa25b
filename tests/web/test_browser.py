"""The page in a real Chromium, against the real daemon."""

import json
import random
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from playwright.sync_api import Browser, Page, expect
from tests.cluster.waiting import wait_for
from tests.web.browser import Watched, needs_chromium, open_page
from tests.web.scene import SMALL, PageDaemon, ask, show

from aimgpu.cli.client import DaemonClient
from aimgpu.keyfile import KeyStore
from aimgpu.units import GIB, MIB, format_bytes, parse_bytes
from aimgpu.web import assets

pytestmark = needs_chromium

MARKUP = "error: <img src=x onerror=document.title='pwned'><script>document.title='pwned'</script>"
SLOW = ("--token-seconds", "0.2", "--tokens", "400")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageDaemon]:
    engines = {"slow": SLOW, "hostile": ("--die-at-start", "3", "--say", MARKUP)}
    daemon = PageDaemon(tmp_path_factory.mktemp("page") / "home", engines=engines, grace_seconds=0.5)
    daemon.start()
    yield daemon
    daemon.stop()


@pytest.fixture
def client(daemon: PageDaemon) -> Iterator[DaemonClient]:
    """What a test deployed is gone after it."""
    client = DaemonClient(daemon.url, daemon.home.read_token())
    yield client
    names = [one["name"] for one in client.read_status()["deployments"]]
    if names:
        client.release(names)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[PageDaemon]:
    """For a test that kills it or changes who may call it."""
    daemon = PageDaemon(tmp_path / "home", grace_seconds=0.5)
    daemon.start()
    yield daemon
    daemon.stop()


@pytest.fixture
def watched(browser: Browser, daemon: PageDaemon) -> Iterator[Watched]:
    found = open_page(browser, daemon.link())
    yield found
    found.page.context.close()
    assert found.foreign == [], "a request left the page's origin"
    assert found.errors == []


@pytest.fixture
def page(watched: Watched) -> Page:
    return watched.page


def row(page: Page, name: str) -> str:
    return f"table.models tr:has(button.name:text-is('{name}'))"


def test_a_model_is_sized_deployed_chatted_with_and_stopped(page: Page, client: DaemonClient) -> None:
    expect(page.get_by_text("No model is deployed yet")).to_be_visible()
    page.get_by_role("button", name="Deploy a model").click()
    page.get_by_label("Model", exact=True).fill("HuggingFaceTB/SmolLM2-135M-Instruct")
    page.get_by_label("Name that callers use").fill("chat")
    page.get_by_role("button", name="Options").click()
    page.get_by_label("Context, tokens").fill("2048")
    expect(page.locator(".verdict .notice.ok")).to_contain_text("Fits: needs")
    expect(page.locator(".verdict .waterfall .step.weights em")).to_contain_text("MiB")
    page.locator("dialog").get_by_role("button", name="Deploy", exact=True).click()
    expect(page.locator(row(page, "chat"))).to_contain_text("ready")
    assert [one["name"] for one in client.read_status()["instances"]] == ["chat"]

    page.locator(row(page, "chat")).get_by_role("button", name="Chat with chat").click()
    page.get_by_label("Message").fill("hello")
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant")).to_contain_text("one two three")
    expect(page.locator(".message.assistant small")).to_contain_text("tokens/s")

    page.get_by_role("link", name="Models", exact=True).click()
    page.get_by_role("button", name="More actions for chat").click()
    page.get_by_role("menuitem", name="Stop", exact=True).click()
    page.locator("dialog").get_by_role("button", name="Stop").click()
    expect(page.get_by_text("No model is deployed yet")).to_be_visible()
    wait_for(lambda: client.read_status()["instances"], lambda found: found == [], "nothing runs")


def test_what_the_page_offers_to_copy_answers_when_it_is_pasted(page: Page, client: DaemonClient, daemon: PageDaemon) -> None:
    show(client, {"chat": SMALL})
    copied = {}
    for name in ("Copy URL", "Copy for curl", "Copy for Python", "Copy for Open WebUI", "Copy for Claude Code"):
        page.get_by_role("button", name=name).click()
        expect(page.locator(".toasts p").last).to_contain_text("Copied")
        copied[name] = page.evaluate("navigator.clipboard.readText()")
    assert copied["Copy URL"] == f"{daemon.url}/v1"
    assert f"OPENAI_API_BASE_URL={daemon.url}/v1 " in copied["Copy for Open WebUI"]
    assert f"ANTHROPIC_BASE_URL={daemon.url} " in copied["Copy for Claude Code"]
    assert "ANTHROPIC_MODEL=chat " in copied["Copy for Claude Code"]
    pasted = ["bash", "-c", copied["Copy for curl"]], [sys.executable, "-c", copied["Copy for Python"]]
    for command in pasted:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert "one two three" in done.stdout, done.stderr


def test_number_keys_switch_views_one_after_the_other_and_a_slash_writes(page: Page, client: DaemonClient) -> None:
    show(client, {"chat": SMALL})
    for key, view in (("2", "chat"), ("3", "activity"), ("4", "promises"), ("2", "chat"), ("5", "what-if"), ("1", "models")):
        page.keyboard.press(key)
        page.wait_for_selector(f"main.view-{view}")
    page.keyboard.press("/")
    expect(page.get_by_label("Message")).to_be_focused()
    page.keyboard.press("3")
    expect(page.get_by_label("Message")).to_have_value("3")


def test_what_does_not_fit_is_refused_with_a_reason_for_every_gpu_and_the_form_stays(page: Page, client: DaemonClient) -> None:
    page.keyboard.press("d")
    page.get_by_label("Model", exact=True).fill("meta-llama/Llama-3.1-405B-Instruct")
    expect(page.locator(".verdict .notice.bad")).to_be_visible()
    expect(page.locator(".verdict .devices li.cannot")).to_have_count(2)
    page.locator("dialog").get_by_role("button", name="Deploy", exact=True).click()
    expect(page.locator("dialog .notice.bad")).to_contain_text("gpu0: ")
    expect(page.get_by_label("Model", exact=True)).to_have_value("meta-llama/Llama-3.1-405B-Instruct")
    expect(page.locator("dialog").get_by_role("button", name="Deploy", exact=True)).to_be_enabled()
    expect(page.locator(".toasts")).to_have_count(0)
    assert client.read_status()["instances"] == []


def test_a_wrong_form_is_answered_in_words_before_it_can_be_sent(page: Page) -> None:
    page.get_by_role("button", name="Deploy a model").click()
    page.get_by_label("Model", exact=True).fill("HuggingFaceTB/SmolLM2-135M-Instruct")
    page.get_by_role("button", name="Options").click()
    page.get_by_label("Keep loaded").fill("for ever")
    expect(page.locator(".verdict .notice.bad")).to_contain_text("for ever")
    expect(page.locator("dialog").get_by_role("button", name="Deploy", exact=True)).to_be_disabled()


def test_a_name_is_checked_as_it_is_sent_and_one_in_use_is_pointed_out(page: Page, client: DaemonClient) -> None:
    show(client, {"chat": SMALL})
    expect(page.locator(row(page, "chat"))).to_contain_text("ready")
    page.get_by_role("button", name="Deploy a model").click()
    page.get_by_label("Model", exact=True).fill("HuggingFaceTB/SmolLM2-135M-Instruct")
    page.get_by_label("Name that callers use").fill("team/chat")
    expect(page.locator(".verdict .notice.bad")).to_contain_text("'team/chat' cannot be a model's name")
    page.get_by_label("Name that callers use").fill("chat")
    expect(page.locator(".verdict .notice.warn")).to_contain_text("chat is deployed already")
    page.get_by_label("Name that callers use").fill("chat-2")
    expect(page.locator(".verdict .notice.warn")).to_have_count(0)


def test_the_longest_name_does_not_widen_a_narrow_page(browser: Browser, client: DaemonClient, daemon: PageDaemon) -> None:
    show(client, {"x" * 63: SMALL})
    page = open_page(browser, daemon.link(), width=390, height=844).page
    expect(page.locator(row(page, "x" * 63))).to_contain_text("ready")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.context.close()


def test_a_body_nested_too_deeply_is_answered_as_bad_input(daemon: PageDaemon) -> None:
    request = urllib.request.Request(f"{daemon.url}/api/v1/what-if", b"[" * 100_000, {"x-aimgpu-page": "1"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=300)
    assert caught.value.code == 400
    assert b"not JSON" in caught.value.read()


def test_what_another_client_does_appears_without_a_reload(page: Page, client: DaemonClient, daemon: PageDaemon) -> None:
    show(client, {"other": SMALL})
    expect(page.locator(row(page, "other"))).to_contain_text("ready")
    expect(page.locator(".bar .share")).to_contain_text("other")
    expect(page.locator(".events")).to_contain_text("ready on")
    assert ask(daemon.url, "other") == 200
    page.get_by_role("link", name="Activity").click()
    expect(page.locator("table.requests tbody tr").first).to_contain_text("other")
    page.get_by_role("button", name="Path of request").first.click()
    expect(page.locator("dialog .path")).to_contain_text("Decode: 24 tokens")
    page.keyboard.press("Escape")
    client.release(["other"])
    page.get_by_role("link", name="Models", exact=True).click()
    expect(page.get_by_text("No model is deployed yet")).to_be_visible()


def test_a_model_is_put_to_sleep_woken_pinned_and_given_another_priority(page: Page, client: DaemonClient) -> None:
    show(client, {"chat": {**SMALL, "keep": "1h"}})

    def act(name: str) -> None:
        page.get_by_role("button", name="More actions for chat").click()
        page.locator(".menu button", has_text=re.compile(rf"^{name}")).click()

    expect(page.locator(row(page, "chat"))).to_contain_text("ready")
    before = client.read_status()["instances"][0]["id"]
    act("Priority high")
    expect(page.locator(row(page, "chat"))).to_contain_text("high priority")
    act("Pin")
    expect(page.locator(row(page, "chat"))).not_to_contain_text("sleeps")
    assert client.read_status()["instances"][0]["id"] == before, "nothing was restarted"
    act("Unpin")
    expect(page.locator(row(page, "chat"))).to_contain_text("sleeps")
    act("Sleep")
    expect(page.locator(row(page, "chat"))).to_contain_text("asleep")
    act("Wake")
    expect(page.locator(row(page, "chat"))).to_contain_text("ready")


def test_a_share_that_nothing_holds_cannot_be_resized_and_the_page_gives_the_reason(page: Page, client: DaemonClient) -> None:
    show(client, {"chat": SMALL})
    page.get_by_role("button", name="More actions for chat").click()
    page.get_by_role("menuitem", name="Resize").click()
    dialog = page.locator("dialog[open]")
    expect(dialog.locator(".notice.bad")).to_contain_text("cannot change while it runs")
    expect(dialog.get_by_role("button", name="Resize")).to_be_disabled()


def test_editing_changes_what_was_edited_and_keeps_the_rest(page: Page, client: DaemonClient) -> None:
    slo = {"ttft_p95": "2s", "availability": "99%"}
    show(client, {"chat": {**SMALL, "concurrency": 2, "slo": slo, "env": {"OMP_NUM_THREADS": "1"}, "place": {"spread": True}}})
    page.get_by_role("button", name="More actions for chat").click()
    page.get_by_role("menuitem", name="Edit").click()
    dialog = page.locator("dialog[open]")
    expect(dialog.get_by_label("First token within (p95)")).to_have_value("2s")
    expect(dialog.get_by_label("Name that callers use")).to_be_disabled()
    dialog.get_by_label("Requests at once").fill("3")
    expect(dialog.locator(".verdict .notice.ok")).to_be_visible()
    dialog.get_by_role("button", name="Apply").click()
    expect(dialog).to_have_count(0)
    page.get_by_role("button", name="Export stack").click()
    written = yaml.safe_load(page.locator("dialog pre").inner_text())["models"]["chat"]
    assert written["concurrency"] == 3
    assert (written["slo"], written["place"]) == (slo, {"spread": True})
    assert written["env"] == {"OMP_NUM_THREADS": "***"}, "a value is shown to nobody"
    again = list(client.apply(yaml.safe_dump({"models": {"chat": written}}), "/", dry_run=True))
    plan = next(event for event in again if event["event"] == "plan")
    assert plan["unchanged"] == ["chat"], "what is masked is kept"


def test_the_drawer_shows_sizing_placement_history_and_the_log(page: Page, client: DaemonClient) -> None:
    show(client, {"chat": {"model": "Qwen/Qwen2.5-7B-Instruct", "engine": "vllm", "context": 4096}})
    page.locator(row(page, "chat")).locator("button.name").click()
    drawer = page.locator("dialog.side")
    drawer.get_by_role("tab", name="Sizing").click()
    expect(drawer.locator(".waterfall .step.weights em")).to_contain_text("GiB")
    expect(drawer.locator(".waterfall .step.measured")).to_be_visible()
    drawer.get_by_role("tab", name="Placement").click()
    expect(drawer.locator(".devices li.chosen")).to_have_count(1)
    drawer.get_by_role("tab", name="History").click()
    expect(drawer.locator(".events")).to_contain_text("ready on")
    drawer.get_by_role("tab", name="Stack entry").click()
    expect(drawer.locator("pre")).to_contain_text("model: Qwen/Qwen2.5-7B-Instruct")
    drawer.get_by_role("tab", name="Logs").click()
    expect(drawer.locator(".log")).to_be_visible()


def test_a_layout_is_previewed_and_changed(page: Page, client: DaemonClient) -> None:
    show(client, {"chat": {"model": "Qwen/Qwen2.5-32B-Instruct", "engine": "vllm", "context": 2048}})
    (gpu,) = {one["device"] for one in client.read_status()["instances"]}
    index = gpu.rpartition("-")[2]
    page.get_by_role("button", name=f"Change the layout of gpu{index}").click()
    page.locator("button.layout", has_text="CPX/NPS1").click()
    expect(page.locator(".preview .notice")).to_contain_text("1 running copy stops")
    page.locator("dialog").get_by_role("button", name="Cancel").click()
    other = "1" if index == "0" else "0"
    page.get_by_role("button", name=f"Change the layout of gpu{other}").click()
    page.locator("button.layout", has_text="CPX/NPS1").click()
    expect(page.locator(".preview .notice")).to_contain_text("Nothing that runs is disturbed")
    page.get_by_role("button", name="Change layout").click()
    expect(page.locator(".gpu", has_text=f"gpu{other}")).to_contain_text("8 partitions")
    list(client.partition(gpu.replace(f"-{index}", f"-{other}"), "SPX/NPS1", reload_driver=False))


def test_what_if_shows_before_and_after_and_changes_nothing(page: Page, client: DaemonClient) -> None:
    show(client, {"chat": SMALL})
    before = client.read_snapshot()
    page.get_by_role("link", name="What if").click()
    page.get_by_label("Model", exact=True).fill("Qwen/Qwen2.5-7B-Instruct")
    page.get_by_role("button", name="Add").click()
    expect(page.get_by_text("It fits.", exact=True)).to_be_visible()
    page.locator(".checks input").check()
    expect(page.locator(".steps")).to_contain_text("stop chat")
    expect(page.locator(".gpu.pair .share.fresh")).to_have_count(1)
    assert client.read_snapshot()["nodes"][0]["devices"] == before["nodes"][0]["devices"]


def test_a_stream_is_stopped_and_two_models_answer_side_by_side(page: Page, client: DaemonClient) -> None:
    show(client, {"slow": SMALL, "quick": SMALL})
    for name in ("slow", "quick"):
        expect(page.locator(row(page, name))).to_contain_text("ready")
    page.goto(page.url.split("#")[0] + "#/chat/slow")
    page.get_by_role("button", name="+ Compare").click()
    expect(page.locator(".pane")).to_have_count(2)
    page.get_by_label("Message").fill("hello")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".pane").nth(1).locator(".message.assistant small")).to_contain_text("tokens/s")
    expect(page.locator(".pane").nth(0).locator(".message.assistant")).to_contain_text("one two")
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(page.locator(".pane").nth(0).locator(".message.assistant small")).to_contain_text("stopped")
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_the_stack_button_writes_a_file_that_can_be_applied(page: Page, client: DaemonClient) -> None:
    show(client, {"chat": {**SMALL, "keep": "20m", "slo": {"ttft_p95": "2s"}}})
    expect(page.locator(row(page, "chat"))).to_contain_text("ready")
    page.get_by_role("button", name="Export stack").click()
    text = page.locator("dialog pre").inner_text()
    events = list(client.apply(text, "/", dry_run=True))
    plan = next(event for event in events if event["event"] == "plan")
    assert plan["unchanged"] == ["chat"], "what was written is what runs"


def test_a_dead_daemon_is_shown_and_its_return_is_noticed(browser: Browser, own: PageDaemon) -> None:
    show(DaemonClient(own.url, own.home.read_token()), {"chat": SMALL})
    port = own.url.rpartition(":")[2]
    page = open_page(browser, own.link()).page
    expect(page.locator(row(page, "chat"))).to_contain_text("ready")
    own.kill()
    expect(page.get_by_role("alert")).to_contain_text("The daemon does not answer.")
    expect(page.locator(row(page, "chat"))).to_be_visible()
    own.port = port
    own.start()
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(page.locator(".connection.live")).to_be_visible()
    page.context.close()


def test_what_others_wrote_stays_text(page: Page, client: DaemonClient) -> None:
    show(client, {"hostile": SMALL})
    expect(page.locator(row(page, "hostile"))).to_contain_text(MARKUP)
    page.locator(row(page, "hostile")).locator("button.name").click()
    expect(page.locator("dialog.side pre")).to_contain_text(MARKUP)
    assert "pwned" not in page.title()
    assert page.locator("img").count() == 0


def read_session(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/api/v1/session", timeout=300) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def test_with_keys_the_page_shows_nothing_before_the_link_or_the_token(browser: Browser, own: PageDaemon) -> None:
    show(DaemonClient(own.url, own.home.read_token()), {"chat": SMALL})
    KeyStore(own.home.keys_file).add("someone")
    wait_for(lambda: read_session(own.url), lambda session: session["keys_required"], "the daemon reads the key file")
    page = browser.new_context().new_page()
    page.goto(own.url)
    expect(page.get_by_text("This daemon asks for its token")).to_be_visible()
    page.get_by_role("button", name="Enter the token").click()
    page.get_by_label("Daemon's token", exact=True).fill("schlüssel")
    page.get_by_role("button", name="Use", exact=True).click()
    expect(page.locator("dialog .notice.warn")).to_contain_text("ASCII only")
    page.get_by_label("Daemon's token", exact=True).fill("wrong")
    page.get_by_role("button", name="Use", exact=True).click()
    expect(page.locator(".toasts .bad")).to_contain_text("The token was not accepted")
    page.get_by_role("button", name="More", exact=True).click()
    page.get_by_role("menuitem", name="Keys").click()
    page.get_by_label("Daemon's token", exact=True).fill(own.home.read_token() or "")
    page.get_by_role("button", name="Use", exact=True).click()
    page.get_by_role("button", name="More actions for chat").click()
    page.get_by_role("menuitem", name="Stop", exact=True).click()
    page.locator("dialog").get_by_role("button", name="Stop").click()
    expect(page.get_by_text("No model is deployed yet")).to_be_visible()
    page.context.close()


def test_no_prompt_is_kept_unless_that_is_switched_on(page: Page, client: DaemonClient, daemon: PageDaemon) -> None:
    show(client, {"chat": SMALL})
    assert ask(daemon.url, "chat") == 200
    page.get_by_role("link", name="Activity").click()
    page.get_by_role("button", name="Path of request").first.click()
    expect(page.locator("dialog .path")).to_be_visible()
    expect(page.locator("dialog pre.prompt")).to_have_count(0)
    expect(page.get_by_text("Prompts and answers are not kept.")).to_be_visible()
    expect(page.locator(".notice.warn")).to_have_count(0)


def test_prompts_that_are_kept_are_few_and_the_page_shows_that_they_are(browser: Browser, tmp_path: Path) -> None:
    daemon = PageDaemon(tmp_path / "home", grace_seconds=0.5)
    daemon.set(AIMGPU_KEEP_PROMPTS="1")
    client = daemon.start()
    try:
        show(client, {"chat": SMALL})
        assert ask(daemon.url, "chat", prompt="what is kept?") == 200
        assert ask(daemon.url, "chat", prompt="only the last") == 200
        page = open_page(browser, daemon.link(), "/#/activity").page
        expect(page.locator(".notice.warn")).to_contain_text("Prompts are kept")
        page.get_by_role("button", name="Path of request 2").click()
        expect(page.locator("dialog pre.prompt")).to_have_text("only the last")
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Path of request 1").click()
        expect(page.locator("dialog pre.prompt")).to_have_text("not kept any more")
        page.context.close()
    finally:
        daemon.stop()


def test_another_site_cannot_make_the_browser_change_anything(
    browser: Browser, daemon: PageDaemon, client: DaemonClient
) -> None:
    show(client, {"chat": SMALL})
    context = browser.new_context()
    page = context.new_page()
    page.route("http://evil.localhost/", lambda route: route.fulfill(body="<p>hello</p>", content_type="text/html"))
    page.goto("http://evil.localhost/")
    body = json.dumps({"names": ["chat"]})
    for headers in ({"content-type": "text/plain"}, {"content-type": "application/json", "x-aimgpu-page": "1"}):
        page.evaluate(
            "([url, body, headers, mode]) => fetch(url, {method: 'POST', body, headers, mode}).then(() => 1, () => 0)",
            [f"{daemon.url}/api/v1/release", body, headers, "cors" if "x-aimgpu-page" in headers else "no-cors"],
        )
    assert [one["name"] for one in client.read_status()["instances"]] == ["chat"]
    context.close()


@pytest.mark.parametrize("path", ["/", "/#/chat", "/#/activity", "/#/promises", "/#/what-if"])
def test_nothing_overflows_a_narrow_screen(browser: Browser, daemon: PageDaemon, client: DaemonClient, path: str) -> None:
    show(client, {"chat": {**SMALL, "slo": {"ttft_p95": "2s"}}, "a-rather-long-name-for-a-model": SMALL})
    watched = open_page(browser, daemon.link(), path, width=390, height=844)
    page = watched.page
    page.wait_for_selector(f"main.view-{path.rpartition('/')[2] or 'models'}")
    if path == "/":
        expect(page.locator(row(page, "chat"))).to_contain_text("ready")
        assert page.locator("table.models thead").bounding_box() is None or page.locator("table.models tr td").count()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert watched.errors == []
    page.context.close()


def test_sizes_are_rounded_as_the_commands_round_them(browser: Browser) -> None:
    numbers = random.Random(5)
    counts = [0, 1023, 1024, MIB - 1, GIB, 48 * GIB - 4 * MIB, 192 * GIB - 16 * MIB]
    counts += [int(2 ** numbers.uniform(0, 42)) for _ in range(200)]
    script = find_page_module("format.js").replace("export ", "")
    page = browser.new_page()
    shown = page.evaluate(
        f"(counts) => {{ {script}; return counts.map((one) => [bytes(one), bytes(one, {{ up: true }})]); }}", counts
    )
    page.close()
    assert [[one.replace(" ", "") for one in pair] for pair in shown] == [
        [format_bytes(count), format_bytes(count, up=True)] for count in counts
    ]
    for count, (down, up) in zip(counts, shown, strict=True):
        assert parse_bytes(down) <= count <= parse_bytes(up), "and can be typed back"


def find_page_module(name: str) -> str:
    return (Path(assets.__file__).parent / "page" / name).read_text(encoding="utf-8")


NAMELESS = """() => [...document.querySelectorAll('button, a, input, select, textarea, [role=tab], [role=img]')]
  .filter((one) => one.offsetParent !== null || one.tagName === 'svg')
  .filter((one) => !(one.textContent.trim() || one.getAttribute('aria-label') || one.title || one.labels?.length))
  .map((one) => one.outerHTML.slice(0, 120))"""


def test_everything_that_can_be_used_has_a_name_for_a_screen_reader(page: Page, client: DaemonClient) -> None:
    show(client, {"chat": {**SMALL, "slo": {"ttft_p95": "2s"}}})
    for view in ("models", "chat", "activity", "promises", "what-if"):
        page.goto(page.url.split("#")[0] + f"#/{view}")
        page.wait_for_selector(f"main.view-{view}")
        assert page.evaluate(NAMELESS) == [], view
    page.keyboard.press("1")
    page.wait_for_selector("main.view-models")
    page.keyboard.press("d")
    page.wait_for_selector("dialog[open]")
    assert page.evaluate(NAMELESS) == []
    page.keyboard.press("Escape")
    expect(page.locator("dialog[open]")).to_have_count(0)
    page.keyboard.press("?")
    expect(page.locator("dialog[open]")).to_contain_text("switch the view")
