"""Views that are tedious to bring about for real: many models, a cluster, and errors; in Chromium, with canned answers."""

import json
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from playwright.sync_api import Browser, expect
from tests.control.world import deployment
from tests.web.browser import needs_chromium
from tests.web.canned_page import CannedPage
from tests.web.page_in_process import local_page

pytestmark = needs_chromium

MODELS = 40


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The state of a machine whose GPUs many models share."""
    wanted = [deployment(f"model-{number:02}", 3 + number % 5) for number in range(MODELS)]
    with local_page(tmp_path_factory.mktemp("crowd"), wanted) as page:
        state: dict[str, Any] = orjson.loads(orjson.dumps(page.state.read({})))
    return state


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with local_page(tmp_path_factory.mktemp("one"), [deployment("chat", 10)]) as page:
        state: dict[str, Any] = orjson.loads(orjson.dumps(page.state.read({})))
    return state


@pytest.fixture(scope="module")
def cluster(one: dict[str, Any]) -> dict[str, Any]:
    facts = {"models": {"chat": "team"}, "namespace": "team", "endpoint": None, "own_rights": False}
    return {**one, "page": {**one["page"], "cluster": facts}}


@pytest.fixture
def canned(browser: Browser) -> Iterator[Any]:
    opened: list[CannedPage] = []

    def make(state: dict[str, Any], answers: dict[str, tuple[int, Any]] | None = None, *, width: int = 1280) -> CannedPage:
        opened.append(CannedPage(browser, state, answers or {}, width))
        return opened[-1]

    yield make
    for one_page in opened:
        one_page.close()


def test_with_many_models_the_table_begins_on_the_first_screen_and_the_rest_of_the_legend_is_one_click_away(
    canned: Any, crowd: dict[str, Any]
) -> None:
    page = canned(crowd).open()
    expect(page.locator("table.models tbody tr")).to_have_count(MODELS)
    first = page.locator("table.models tbody tr").first.bounding_box()
    assert first is not None
    assert first["y"] + first["height"] < 900
    shared = max(len(gpu["partitions"][0]["shares"]) for gpu in crowd["gpus"])
    gpu = next(gpu for gpu in crowd["gpus"] if len(gpu["partitions"][0]["shares"]) == shared)
    legend = page.locator(".gpu", has_text=f"GPU {gpu['index']}").locator(".legend")
    assert shared > 11
    expect(legend.locator("span")).to_have_count(10)
    legend.get_by_role("button", name=f"+{shared - 10} more").click()
    expect(legend.locator("span")).to_have_count(shared)
    expect(legend.get_by_role("button")).to_have_attribute("aria-expanded", "true")
    legend.get_by_role("button", name="fewer").click()
    expect(legend.locator("span")).to_have_count(10)


def test_with_many_models_nothing_overflows_a_narrow_screen(canned: Any, crowd: dict[str, Any]) -> None:
    page = canned(crowd, width=390).open()
    expect(page.locator("table.models tbody tr")).to_have_count(MODELS)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for legend in page.locator(".legend").all():
        box = legend.bounding_box()
        assert box is not None
        assert box["height"] < 300


def test_the_largest_shares_are_the_ones_in_a_short_legend(canned: Any, crowd: dict[str, Any]) -> None:
    page = canned(crowd).open()
    for gpu in crowd["gpus"]:
        shares = gpu["partitions"][0]["shares"]
        if len(shares) <= 11:
            continue
        shown = page.locator(".gpu", has_text=f"GPU {gpu['index']}").locator(".legend span").all_inner_texts()
        sizes = {share["model"]: share["memory_bytes"] for share in shares}
        named = [name for name in sizes if any(name in text for text in shown)]
        assert min(sizes[name] for name in named) >= max(size for name, size in sizes.items() if name not in named)


def test_a_chat_that_fails_shows_commands_as_commands(canned: Any, one: dict[str, Any]) -> None:
    refused = {"error": {"message": "No model `x` here.", "hint": "`aimgpu ps` lists them.", "code": "model_not_found"}}
    page = canned(one, {"POST /v1/chat/completions": (404, refused)}).open("/#/chat/chat")
    page.get_by_label("Message").fill("hello")
    page.keyboard.press("Enter")
    notice = page.locator(".message .notice.bad")
    expect(notice).to_have_text("No model x here. aimgpu ps lists them.")
    assert notice.locator("code").all_inner_texts() == ["x", "aimgpu ps"]


def test_an_announced_error_has_no_marks_of_markup(canned: Any, one: dict[str, Any]) -> None:
    refused = {"error": {"message": "it does not sleep", "hint": "`aimgpu logs chat` has the reason.", "code": "conflict"}}
    page = canned(one, {"POST /api/v1/models/chat/sleep": (409, refused)}).open()
    page.get_by_role("button", name="More actions for chat").click()
    page.get_by_role("menuitem", name="Sleep").click()
    expect(page.locator("#announcer")).to_have_text("it does not sleep. aimgpu logs chat has the reason.")
    expect(page.locator(".toasts code")).to_have_text("aimgpu logs chat")


EXPLAINED: dict[str, Any] = {
    "name": "chat",
    "stack": "models: {}",
    "fields": {"model": "10gib", "priority": "medium", "keep": "always", "gpu": {"memory": "10GiB"}},
    "footprint": None,
    "explanations": [
        {
            "instance": "chat-1",
            "facts": ["kube-scheduler chose node n1.", "ResourceClaim c holds 10GiB of gpu-0/cpx-3."],
            "decision": None,
            "devices": [
                {"device_id": "n1/gpu-0", "verdict": "chosen", "text": "cpx-3: 12GiB stays free there", "loss": None},
                {"device_id": "n2/gpu-0", "verdict": "cannot", "text": "has 4GiB free; 10GiB is needed", "loss": None},
            ],
            "left_out": 1200,
            "note": "Judged on what the objects show now.",
        }
    ],
}


def test_on_a_cluster_the_drawer_explains_what_was_chosen_and_what_was_refused(canned: Any, cluster: dict[str, Any]) -> None:
    page = canned(cluster, {"GET /api/v1/models/chat": (200, EXPLAINED)}).open()
    page.locator("button.name", has_text="chat").click()
    page.get_by_role("tab", name="Placement").click()
    panel = page.get_by_role("tabpanel", name="Placement")
    expect(panel).to_contain_text("kube-scheduler chose node n1.")
    expect(panel.locator("li.chosen")).to_contain_text("n1/gpu-0")
    expect(panel.locator("li.cannot")).to_contain_text("has 4GiB free; 10GiB is needed")
    expect(panel).to_contain_text("and 1,200 more GPUs")


def test_an_open_drawer_follows_what_happens_to_its_model(canned: Any, one: dict[str, Any]) -> None:
    nothing = {**EXPLAINED, "explanations": []}
    made = canned(one, {"GET /api/v1/models/chat": (200, nothing)})
    page = made.open()
    page.locator("button.name", has_text="chat").click()
    page.get_by_role("tab", name="Placement").click()
    panel = page.get_by_role("tabpanel", name="Placement")
    expect(panel).to_have_text("Nothing of it is on a GPU now.")
    made.push("models", one["models"])
    made.answers["GET /api/v1/models/chat"] = (200, EXPLAINED)
    (model,) = one["models"]
    made.push("models", [{**model, "granted_bytes": model["granted_bytes"] + 1}])
    expect(panel.locator("li.chosen")).to_contain_text("n1/gpu-0")
    assert [key for key, _ in made.asked].count("GET /api/v1/models/chat") == 2, "once for each change, not for each drawing"


def test_a_pod_that_waits_is_explained_with_what_would_fit(canned: Any, cluster: dict[str, Any]) -> None:
    refused = {"placed": False, "summary": "No GPU has room.", "reasons": [], "would_fit": ["Ask for at most 4GiB."]}
    waiting = {**EXPLAINED["explanations"][0], "decision": refused, "facts": ["kube-scheduler has no place for it."]}
    page = canned(cluster, {"GET /api/v1/models/chat": (200, {**EXPLAINED, "explanations": [waiting]})}).open()
    page.locator("button.name", has_text="chat").click()
    page.get_by_role("tab", name="Placement").click()
    panel = page.get_by_role("tabpanel", name="Placement")
    expect(panel.locator(".notice.bad")).to_have_text("No GPU has room.")
    expect(panel).to_contain_text("Ask for at most 4GiB.")


def test_on_a_cluster_a_resize_reports_the_restart_before_it_is_done(canned: Any, cluster: dict[str, Any]) -> None:
    share = {
        "instance": "chat-1",
        "partition": "n1/gpu-0/spx-0",
        "before_bytes": 10 << 30,
        "used_bytes": None,
        "free_bytes": None,
    }
    note = "Its pod is restarted with 12.5GiB. The old pod answers until the new one is ready."
    planned = {"changes": [share], "note": note, "rollout": {"restarts": True, "old_serves": True, "changed": True}}
    answers = {"POST /api/v1/resize?dry_run=1": (200, planned), "POST /api/v1/resize": (200, planned)}
    page = canned(cluster, answers).open()
    page.get_by_role("button", name="More actions for chat").click()
    page.get_by_role("menuitem", name="Resize").click()
    dialog = page.get_by_role("dialog", name="Resize chat")
    dialog.get_by_label("Memory for each copy").fill("12.5")
    expect(dialog.locator(".notice")).to_have_text(f"n1/gpu-0/spx-0: 10 GiB now.{note}")
    with page.expect_request(lambda request: request.url.endswith("/api/v1/resize")) as sent:
        dialog.get_by_role("button", name="Restart with this share").click()
    assert sent.value.post_data_json == {"model": "chat", "memory_bytes": int(12.5 * 2**30)}
    expect(page.locator(".toasts")).to_contain_text("chat is being restarted with its new share.")


def test_a_need_never_looks_larger_than_the_grant_that_was_made_for_it(canned: Any, one: dict[str, Any]) -> None:
    odd = (10 << 30) + 1
    (model,) = one["models"]
    made = canned({**one, "models": [{**model, "granted_bytes": odd, "planned_bytes": odd - 1, "measured_bytes": odd - 2}]})
    cell = made.open().locator("td[data-label='Granted / measured']")
    expect(cell).to_contain_text("10.1 / 10 GiB")
    expect(cell).to_contain_text("sized 10 GiB")


def test_a_supposition_that_is_refused_shows_the_words(canned: Any, one: dict[str, Any]) -> None:
    refused = {"error": {"message": "`contxt` is not known", "hint": "Did you mean `context`?", "code": "invalid_input"}}
    page = canned(one, {"POST /api/v1/what-if": (400, refused)}).open("/#/what-if")
    page.get_by_label("Model", exact=True).fill("org/model")
    page.get_by_role("button", name="Add").click()
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("contxt is not known")
    assert alert.locator("code").all_inner_texts() == ["contxt", "context"]


def test_a_menu_stays_inside_a_narrow_window(canned: Any, one: dict[str, Any]) -> None:
    page = canned(one).open()
    page.set_viewport_size({"width": 390, "height": 844})
    page.get_by_role("button", name="More actions for chat").click()
    box = page.get_by_role("menu").bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 390


def test_the_parts_of_a_gpu_add_up_as_they_are_shown(canned: Any, one: dict[str, Any]) -> None:
    whole, granted, foreign = 206061465600, 55298752512, 3 << 30
    free = whole - granted - foreign
    sizes = {"memory_bytes": whole, "granted_bytes": granted, "foreign_bytes": foreign, "free_bytes": free}
    page = canned({**one, "gpus": [{**one["gpus"][0], **sizes}]}).open()
    expect(page.locator(".gpuTitle")).to_contain_text("51.6 granted · 3 used by other processes · 137.3 free of 191.9 GiB")


def test_an_answer_that_streams_is_announced_and_not_read_again_at_every_token(canned: Any, one: dict[str, Any]) -> None:
    words = [f"Sentence {number} of an answer that is long enough to be spoken alone. " for number in range(3)]
    chunks = [{"choices": [{"delta": {"content": word}}]} for word in words]
    stream = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page = canned(one).open("/#/chat/chat")
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=stream, content_type="text/event-stream"))
    page.evaluate(
        "() => { window.said = []; const box = document.getElementById('announcer');"
        " new MutationObserver(() => window.said.push(box.textContent)).observe(box, { childList: true }); }"
    )
    page.get_by_label("Message").fill("hello")
    page.keyboard.press("Enter")
    page.wait_for_function("() => window.said.some((text) => text.includes('first token'))")
    said = " ".join(page.evaluate("() => window.said"))
    assert [said.count(f"Sentence {number}") for number in range(3)] == [1, 1, 1]
    expect(page.get_by_role("log")).to_have_attribute("aria-live", "off")


def test_a_gpu_that_does_not_report_its_use_does_not_look_unused(canned: Any, one: dict[str, Any]) -> None:
    holds, empty = {"granted_bytes": 10 << 30, "measured_bytes": None}, {"granted_bytes": 0, "measured_bytes": 0}
    first, second = one["gpus"]
    made = canned({**one, "gpus": [{**first, **holds}, {**second, **empty}]})
    page = made.open()
    expect(page.locator(".tiles")).to_contain_text("measured: GPU 0 does not report it")
    samples = [{first["id"]: {"granted": 10 << 30, "measured": size, "busy": None}} for size in (0, None)]
    made.push(
        "history", [{"at": 100 + at, "gpus": gpus, "models": {}, "budget": {}, "gate": {}} for at, gpus in enumerate(samples)]
    )
    page.get_by_role("link", name="Activity").click()
    expect(page.get_by_role("figure").first).to_contain_text("GPU 0 measured\N{EN DASH}")


def test_an_answer_that_is_cut_off_keeps_what_came_and_reports_the_lost_connection(canned: Any, one: dict[str, Any]) -> None:
    page = canned(one).open("/#/chat/chat")
    chunk = "data: " + json.dumps({"choices": [{"delta": {"content": "Once upon"}}]}) + "\n\n"
    page.evaluate(
        """chunk => {
          let asked = 0;
          window.fetch = () => Promise.resolve(new Response(new ReadableStream({ pull(to) {
            asked += 1;
            if (asked === 1) to.enqueue(new TextEncoder().encode(chunk));
            else to.error(new TypeError("network error"));
          } })));
        }""",
        chunk,
    )
    page.get_by_label("Message").fill("hello")
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant")).to_contain_text("Once upon")
    expect(page.locator(".message.assistant")).to_contain_text("The connection to the daemon was lost.")


def test_one_gpu_of_several_that_cannot_be_read_is_marked(canned: Any, one: dict[str, Any]) -> None:
    first, second = one["gpus"]
    page = canned({**one, "gpus": [first, {**second, "error": "the driver does not answer for it"}]}).open()
    expect(page.locator(".gpuTitle", has_text="cannot be read")).to_have_count(1)
    expect(page.locator(".gpuTitle").nth(1)).to_contain_text("cannot be read")


def test_the_longest_name_widens_no_view_of_a_narrow_page(canned: Any, one: dict[str, Any]) -> None:
    (model,) = one["models"]
    page = canned({**one, "models": [{**model, "name": "x" * 63}]}, width=390).open("/#/what-if")
    expect(page.locator(".check").first).to_contain_text("x" * 63)
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_a_chart_of_memory_that_nothing_holds_has_an_axis_in_gibibytes(canned: Any, one: dict[str, Any]) -> None:
    made = canned(one)
    page = made.open("/#/activity")
    gpus = {one["gpus"][0]["id"]: {"granted": 0, "measured": 0, "busy": None}}
    made.push("history", [{"at": at, "gpus": gpus, "models": {}, "budget": {}, "gate": {}} for at in (100, 105)])
    expect(page.get_by_role("figure").first.locator(".yAxis span").first).to_have_text("1 GiB")


def test_a_promise_with_too_few_requests_for_a_budget_does_not_look_unmeasured(canned: Any, one: dict[str, Any]) -> None:
    (model,) = one["models"]
    burns = {"fast_burn": None, "slow_burn": None, "budget_left": None}
    target = {"name": "ttft_p95", "class": "all", "target_part": 0.95, "target_seconds": 0.5, "attainment": 0.0, **burns}
    targets = [{**target, "target_tokens_per_second": None, "promise": "95% ttft <= 500ms"}]
    page = canned({**one, "models": [{**model, "targets": targets}]}).open("/#/promises")
    expect(page.locator(".promise")).to_contain_text("too few requests yet")
