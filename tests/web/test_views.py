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
    legend = page.locator(".gpu", has_text=f"gpu{gpu['index']}").locator(".legend")
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
        shown = page.locator(".gpu", has_text=f"gpu{gpu['index']}").locator(".legend span").all_inner_texts()
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
    page.get_by_role("menuitem", name="Sleep", exact=True).click()
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
    cell = made.open().locator("td[data-label='Memory']")
    expect(cell).to_contain_text("10.1 GiB")
    expect(cell).to_contain_text("10 GiB measured")
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


def test_the_parts_of_a_gpu_are_rounded_as_the_commands_round_them(canned: Any, one: dict[str, Any]) -> None:
    whole, granted, foreign = 206061465600, 55298752512, 3 << 30
    free = whole - granted - foreign
    sizes = {"memory_bytes": whole, "granted_bytes": granted, "foreign_bytes": foreign, "free_bytes": free}
    page = canned({**one, "gpus": [{**one["gpus"][0], **sizes}]}).open()
    expect(page.locator(".gpuTitle")).to_contain_text("51.6 granted · 3 used by other processes · 137.4 free of 191.9 GiB")


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
    made = canned({**one, "gpus": [{**first, **holds, "simulated": False}, {**second, **empty, "simulated": False}]})
    page = made.open()
    expect(page.locator(".tiles")).to_contain_text("measured: gpu0 does not report it")
    samples = [{first["id"]: {"granted": 10 << 30, "measured": size, "busy": None}} for size in (0, None)]
    made.push(
        "history", [{"at": 100 + at, "gpus": gpus, "models": {}, "budget": {}, "gate": {}} for at, gpus in enumerate(samples)]
    )
    page.get_by_role("link", name="Activity").click()
    expect(page.get_by_role("figure").first).to_contain_text("gpu0 measured\N{EN DASH}")


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
    burns: dict[str, Any] = {"fast_burn": None, "slow_burn": None, "budget_left": None}
    burns |= {"judged": 3, "attainment": None}
    target = {"name": "ttft_p95", "class": "all", "target_part": 0.95, "target_seconds": 0.5, **burns}
    targets = [{**target, "target_tokens_per_second": None, "promise": "95% ttft <= 500ms"}]
    page = canned({**one, "models": [{**model, "targets": targets}]}).open("/#/promises")
    expect(page.locator(".promise")).to_contain_text("too few requests yet")


def test_three_small_models_on_a_large_gpu_can_be_seen_and_clicked(canned: Any, one: dict[str, Any]) -> None:
    gpu = one["gpus"][0]
    (part,) = gpu["partitions"]
    (share,) = [share for other in one["gpus"] for each in other["partitions"] for share in each["shares"]]
    whole, size = 192 << 30, 2 << 30
    shares = [{**share, "instance": name, "model": name, "memory_bytes": size, "terms": []} for name in ("a", "b", "c")]
    part = {**part, "memory_bytes": whole, "foreign_bytes": 0, "free_bytes": whole - 3 * size, "shares": shares}
    bar = {**gpu, "memory_bytes": whole, "granted_bytes": 3 * size, "free_bytes": whole - 3 * size, "partitions": [part]}
    page = canned({**one, "gpus": [bar]}).open()
    group = page.get_by_role("group", name=f"Memory of gpu{gpu['index']}")
    for name in ("a", "b", "c"):
        box = group.get_by_role("button", name=f"{name}:").bounding_box()
        assert box is not None
        assert box["width"] > 150
    expect(group.get_by_role("img", name="186 GiB free, not drawn to scale")).to_be_visible()
    group.get_by_role("button", name="b:").click()
    expect(page.get_by_role("dialog", name="Model b")).to_be_visible()


def test_a_share_of_a_full_gpu_is_drawn_to_scale_and_a_sliver_is_wide_enough_to_be_clicked(
    canned: Any, one: dict[str, Any]
) -> None:
    gpu = one["gpus"][0]
    (part,) = gpu["partitions"]
    (share,) = [share for other in one["gpus"] for each in other["partitions"] for share in each["shares"]]
    sizes = {"large": 96 << 30, "tiny": 1 << 30}
    shares = [{**share, "instance": name, "model": name, "memory_bytes": size, "terms": []} for name, size in sizes.items()]
    part = {**part, "memory_bytes": 192 << 30, "foreign_bytes": 0, "free_bytes": 95 << 30, "shares": shares}
    page = canned({**one, "gpus": [{**gpu, "memory_bytes": 192 << 30, "partitions": [part]}]}).open()
    bar = page.locator(".bar").bounding_box()
    large, tiny = (page.locator(".share").nth(at).bounding_box() for at in (0, 1))
    assert bar is not None
    assert large is not None
    assert tiny is not None
    assert large["width"] / bar["width"] == pytest.approx(0.5, abs=0.02)
    assert tiny["width"] >= 24


def test_a_row_without_traffic_or_promise_has_words_and_no_dashes(canned: Any, one: dict[str, Any]) -> None:
    page = canned(one).open()
    text = page.locator("table.models").inner_text()
    assert "\N{EN DASH}" not in text
    assert "Error budget" not in text, "a column that would be empty is left out"
    expect(page.locator("td[data-label=Traffic]")).to_have_text("no request yet")


def test_a_share_that_nothing_enforces_is_called_that(canned: Any, one: dict[str, Any]) -> None:
    (model,) = one["models"]
    (instance,) = model["instances"]
    places = [{**place, "level": "none", "mechanism": None} for place in instance["places"]]
    page = canned({**one, "models": [{**model, "instances": [{**instance, "places": places}]}]}).open()
    expect(page.locator(".level")).to_have_text("not enforced")


FOUND = {"engine": "llamacpp", "download_bytes": 4 << 30, "memory_bytes": 6 << 30, "on_disk": False, "runs_here": True}
CANDIDATES = [
    {"name": "org/Seven-7B-Instruct", "model": "org/Seven-7B-Instruct-GGUF:Q4_K_M", "reason": None, **FOUND},
    {"name": "org/Small", "model": "org/Small", "reason": None, **FOUND, "on_disk": True},
    {
        "name": "org/Seven-VL",
        "model": "org/Seven-VL",
        **FOUND,
        "engine": None,
        "memory_bytes": None,
        "runs_here": False,
        "reason": "org/Seven-VL is published as safetensors, which no engine that runs here reads (vllm: is not installed)",
    },
]
SIZED: dict[str, Any] = {
    "engine": "llamacpp",
    "footprint": {"total_bytes": 6 << 30, "exactness": "estimated", "terms": [], "notes": []},
    "service": None,
    "fits": True,
    "decision": {"because": "it fits there"},
    "devices": [],
    "replaces": [],
    "copies": 1,
    "variants": [],
}
OFFERED = {
    "GET /api/v1/models/search?q=": (200, {"models": CANDIDATES}),
    "GET /api/v1/models/search?q=seven": (200, {"models": CANDIDATES}),
    "GET /api/v1/catalogue": (200, {"models": [], "engines": []}),
    "POST /api/v1/size": (200, SIZED),
}


def test_a_model_is_found_by_a_part_of_its_name_with_its_size_and_why_it_does_not_run(canned: Any, one: dict[str, Any]) -> None:
    made = canned(one, OFFERED)
    page = made.open()
    page.keyboard.press("d")
    dialog = page.get_by_role("dialog", name="Deploy a model")
    expect(dialog.locator("input, select")).to_have_count(1)
    dialog.get_by_label("Model", exact=True).fill("seven")
    offered = dialog.get_by_role("group", name="Models found").get_by_role("button")
    expect(offered.nth(0)).to_contain_text("4 GiB to download · needs 6 GiB · llamacpp")
    expect(offered.nth(1)).to_contain_text("on disk")
    expect(offered.nth(2)).to_contain_text("Is published as safetensors, which no engine that runs here reads.")
    expect(offered.nth(2)).to_be_disabled()
    offered.nth(0).click()
    expect(dialog.get_by_label("Name that callers use")).to_have_value("seven-7b")
    expect(dialog.locator("footer")).to_contain_text("Fits: needs 6 GiB")
    sized = [body for key, body in made.asked if key == "POST /api/v1/size"]
    assert [body["fields"]["model"] for body in sized] == ["org/Seven-7B-Instruct-GGUF:Q4_K_M"], "and nothing half typed"


def test_a_deployment_that_fails_leaves_the_form_with_the_reason_once(canned: Any, one: dict[str, Any]) -> None:
    line = {"event": "error", "message": "cannot fetch org/Small: no network", "hint": "Check the network.", "code": "x"}
    page = canned(one, {**OFFERED, "POST /api/v1/apply": (200, line)}).open()
    page.keyboard.press("d")
    dialog = page.get_by_role("dialog", name="Deploy a model")
    dialog.get_by_role("button", name="org/Small").click()
    dialog.get_by_label("Name that callers use").fill("mine")
    expect(dialog.locator(".verdict .notice.ok")).to_be_visible()
    dialog.get_by_role("button", name="Deploy", exact=True).click()
    expect(dialog.get_by_text("cannot fetch org/Small: no network")).to_have_count(1)
    expect(dialog.get_by_label("Name that callers use")).to_have_value("mine")
    expect(dialog.get_by_role("button", name="Deploy", exact=True)).to_be_enabled()
    expect(page.locator(".toasts")).to_have_count(0)


def answer_with(page: Any, text: str) -> None:
    chunk = json.dumps({"choices": [{"delta": {"content": text}}]})
    stream = f"data: {chunk}\n\ndata: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=stream, content_type="text/event-stream"))


def test_an_answer_is_shown_as_markdown_without_any_markup_of_its_own(canned: Any, one: dict[str, Any]) -> None:
    page = canned(one).open("/#/chat/chat")
    answer_with(page, "**Bold** and `code`.\n\n```python\nprint(1)\n```\n\n<img src=x onerror=alert(1)>")
    page.get_by_label("Message").fill("hello")
    page.keyboard.press("Enter")
    answer = page.locator(".message.assistant")
    expect(answer.locator("strong")).to_have_text("Bold")
    expect(answer.locator("pre")).to_have_text("print(1)")
    expect(answer).to_contain_text("<img src=x onerror=alert(1)>")
    assert page.locator("img").count() == 0
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answer.get_by_role("button", name="Copy the code").click()
    assert page.evaluate("navigator.clipboard.readText()") == "print(1)"
    answer.get_by_role("button", name="Copy the answer").click()
    assert page.evaluate("navigator.clipboard.readText()").startswith("**Bold** and `code`.")


def test_a_system_prompt_goes_before_the_conversation(canned: Any, one: dict[str, Any]) -> None:
    page = canned(one).open("/#/chat/chat")
    answer_with(page, "Ahoy.")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Answer as a pirate.")
    page.get_by_label("Message").fill("hello")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.keyboard.press("Enter")
    assert sent.value.post_data_json["messages"] == [
        {"role": "system", "content": "Answer as a pirate."},
        {"role": "user", "content": "hello"},
    ]


def test_an_answer_is_read_in_a_column_of_720_pixels(canned: Any, one: dict[str, Any]) -> None:
    page = canned(one).open("/#/chat/chat")
    answer_with(page, "word " * 300)
    page.get_by_label("Message").fill("hello")
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant .below")).to_contain_text("first token")
    box = page.locator(".message.assistant").bounding_box()
    assert box is not None
    assert box["width"] == pytest.approx(720, abs=1)


REQUEST = {
    "number": 1,
    "ended": 1.0,
    "model": "chat",
    "instance": "chat-0",
    "caller": "anyone",
    "priority": "high",
    "status": 200,
    "code": None,
    "streamed": False,
    "queued_seconds": 0.0,
    "first_byte_seconds": 0.1,
    "seconds": 0.2,
    "tokens": 5,
    "recalls": 0,
}


def test_only_requests_that_failed_are_marked_and_a_click_on_a_row_shows_its_path(canned: Any, one: dict[str, Any]) -> None:
    made = canned(one)
    page = made.open("/#/activity")
    failed = {**REQUEST, "number": 2, "status": 503, "code": "no_room", "ended": 90_000.0}
    made.push("requests", [REQUEST, failed])
    rows = page.locator("table.requests tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.nth(0).locator(".pill.bad")).to_have_text("failed 503")
    expect(rows.nth(1).locator(".pill")).to_have_count(0)
    expect(rows.nth(1)).to_contain_text("1970-01-01")
    head = page.locator("table.requests thead").inner_text()
    assert "First token" not in head, "a column that would be empty is left out"
    rows.nth(1).locator("td").nth(3).click()
    expect(page.get_by_role("dialog", name="Path of a request")).to_contain_text("Request 1 to chat")


def test_the_charts_show_the_time_that_was_chosen(canned: Any, one: dict[str, Any]) -> None:
    made = canned(one)
    page = made.open("/#/activity")
    gpus = {one["gpus"][0]["id"]: {"granted": 1 << 30, "measured": 0, "busy": None}}
    samples = [{"at": at, "gpus": gpus, "models": {}, "budget": {}, "gate": {}} for at in range(0, 3601, 60)]
    made.push("history", samples)
    figure = page.get_by_role("figure").first
    drawn = "path => path.getAttribute('d').split('L').length"
    assert figure.locator("path").first.evaluate(drawn) == 6
    page.get_by_label("Time range").select_option("3600")
    page.wait_for_function("() => document.querySelector('.chart path').getAttribute('d').split('L').length === 61")


def test_a_model_without_a_promise_is_given_one(canned: Any, one: dict[str, Any]) -> None:
    fields = {"model": "10gib", "gpu": {"memory": "10GiB"}}
    answers = {
        "GET /api/v1/models/chat": (200, {**EXPLAINED, "fields": fields}),
        "POST /api/v1/apply": (200, {"event": "done"}),
    }
    made = canned(one, answers)
    page = made.open("/#/promises")
    page.get_by_role("button", name="Add a promise to chat").click()
    dialog = page.get_by_role("dialog", name="Add a promise to chat")
    expect(dialog.get_by_role("button", name="Promise", exact=True)).to_be_disabled()
    dialog.get_by_label("First token within").fill("500ms")
    dialog.get_by_role("button", name="Promise", exact=True).click()
    expect(dialog).to_have_count(0)
    (applied,) = [body for key, body in made.asked if key == "POST /api/v1/apply"]
    assert json.loads(applied["stack"]) == {"models": {"chat": {**fields, "slo": {"ttft_p95": "500ms"}}}}


def test_a_promise_that_is_refused_keeps_its_form(canned: Any, one: dict[str, Any]) -> None:
    refused = {
        "error": {"message": "ttft_p95 'soon' is no duration", "hint": "For example 500ms.", "code": "invalid_stack_file"}
    }
    page = canned(one, {"GET /api/v1/models/chat": (200, EXPLAINED), "POST /api/v1/apply": (400, refused)}).open("/#/promises")
    page.get_by_role("button", name="Add a promise to chat").click()
    dialog = page.get_by_role("dialog", name="Add a promise to chat")
    dialog.get_by_label("First token within").fill("soon")
    dialog.get_by_role("button", name="Promise", exact=True).click()
    expect(dialog.get_by_role("alert")).to_contain_text("'soon' is no duration")
    expect(dialog.get_by_label("First token within")).to_have_value("soon")


def test_what_if_begins_with_questions_and_ends_with_doing_it(canned: Any, one: dict[str, Any]) -> None:
    bars: dict[str, Any] = {"before": [], "after": []}
    answer = {"fits": True, "because": "1 instance placed", "steps": [], "placements": [], "refusals": [], **bars}
    found = {"GET /api/v1/models/search?q=Qwen2.5-7B-Instruct": (200, {"models": CANDIDATES})}
    made = canned(one, {**OFFERED, **found, "POST /api/v1/what-if": (200, answer)})
    page = made.open("/#/what-if")
    page.get_by_role("button", name="Does a 7B model for chat fit as well?").click()
    expect(page.get_by_text("It fits.", exact=True)).to_be_visible()
    (asked,) = [body for key, body in made.asked if key == "POST /api/v1/what-if"]
    assert asked["add"] == [{"name": "seven-7b-instruct", "fields": {"model": "org/Seven-7B-Instruct-GGUF:Q4_K_M"}}]
    page.get_by_role("button", name="Deploy seven-7b-instruct").click()
    dialog = page.get_by_role("dialog", name="Deploy a model")
    expect(dialog.get_by_label("Name that callers use")).to_have_value("seven-7b-instruct")
    expect(dialog.locator("footer")).to_contain_text("Fits: needs 6 GiB")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Start over").click()
    page.get_by_role("button", name="What is free without chat?").click()
    page.get_by_role("button", name="Stop chat").click()
    expect(page.get_by_role("dialog", name="Stop chat?")).to_be_visible()


def test_an_empty_chat_has_questions_to_begin_with(canned: Any, one: dict[str, Any]) -> None:
    page = canned(one).open("/#/chat/chat")
    answer_with(page, "A processor for graphics.")
    page.get_by_role("button", name="What is a GPU?").click()
    expect(page.locator(".message.user")).to_have_text("What is a GPU? Answer in one sentence.")
    expect(page.locator(".message.assistant")).to_contain_text("A processor for graphics.")


def test_on_a_narrow_screen_what_would_happen_stands_above_the_form(canned: Any, one: dict[str, Any]) -> None:
    bars: dict[str, Any] = {"before": [], "after": []}
    answer = {"fits": True, "because": "nothing stops", "steps": [], "placements": [], "refusals": [], **bars}
    page = canned(one, {"POST /api/v1/what-if": (200, answer)}, width=390).open("/#/what-if")
    page.get_by_role("button", name="What is free without chat?").click()
    shown = page.get_by_text("It fits.", exact=True).bounding_box()
    form = page.get_by_role("heading", name="A model is added").bounding_box()
    assert shown is not None
    assert form is not None
    assert shown["y"] < form["y"]
