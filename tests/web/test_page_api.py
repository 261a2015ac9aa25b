"""The page's part of the HTTP API: what it answers, what it refuses and in which words, and who may do what."""

import asyncio
import gzip
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.control.world import deployment, resident
from tests.web.calling import HOST, PAGE, Answer, Browser
from tests.web.page_in_process import TOKEN, LocalPage, local_page
from tests.web.test_prompts import finished

from aimgpu.domain import Priority
from aimgpu.units import GIB
from aimgpu.web.assets import SAFETY_HEADERS, asset_names
from aimgpu.web.sources import Change


@pytest.fixture
def page(tmp_path: Path) -> Iterator[LocalPage]:
    with local_page(tmp_path, [deployment("chat", 40)], prompts=1) as found:
        yield found


def get(page: LocalPage, path: str, browser: Browser | None = None) -> Answer:
    return asyncio.run((browser or page.browser).get(path))


def send(page: LocalPage, method: str, path: str, body: object, browser: Browser | None = None) -> Answer:
    return asyncio.run((browser or page.browser).send(method, path, body))


def stranger(page: LocalPage, **fields: Any) -> Browser:
    return Browser(page.application, **fields)


def test_every_section_of_the_state_is_about_what_runs(page: LocalPage) -> None:
    page.notes = ["The interposer could not be built."]
    state = get(page, "/api/v1/state").json
    assert (state["page"]["version"], state["page"]["node"], state["page"]["simulated"]) == ("1.2.3", "here", ["MI300X"])
    assert state["page"]["notes"] == [
        "The interposer could not be built.",
        "Prompts are kept: those of the last 1 requests, in memory, for the daemon's user (AIMGPU_KEEP_PROMPTS).",
    ]
    (model,) = state["models"]
    assert (model["name"], model["state"], model["granted_bytes"]) == ("chat", "ready", 40 * GIB)
    assert sum(gpu["granted_bytes"] for gpu in state["gpus"]) == 40 * GIB
    assert all(gpu["free_bytes"] + gpu["granted_bytes"] <= gpu["memory_bytes"] for gpu in state["gpus"])
    assert state["queue"] == {"queue": {}, "pressure": {}}


def test_a_waiting_model_has_its_reason_and_a_resident_the_time_until_it_is_unloaded(tmp_path: Path) -> None:
    with local_page(tmp_path, [deployment("chat", 40, keep_seconds=600)]) as page:
        page.residents = [resident("chat", keep_seconds=600, idle_seconds=100.0)]
        (model,) = get(page, "/api/v1/state").json["models"]
        assert 495 <= model["sleep_at"] - time.time() <= 505
        page.residents = [resident("chat", keep_seconds=600, idle_seconds=5000.0)]
        (model,) = get(page, "/api/v1/state").json["models"]
        assert model["sleep_at"] - time.time() <= 1, "overdue is now, never a time in the past"
        page.residents = [resident("chat", keep_seconds=600, in_flight=2)]
        (model,) = get(page, "/api/v1/state").json["models"]
        assert model["sleep_at"] is None, "a request holds it"


def test_the_drawer_has_sizing_placement_and_a_stack_entry(page: LocalPage) -> None:
    asyncio.run(page.browser.get("/api/v1/state"))  # sizes the models
    found = get(page, "/api/v1/models/chat").json
    assert found["footprint"]["total_bytes"] == 40 * GIB
    assert [term["name"] for term in found["footprint"]["terms"]] == ["weights", "context"]
    (explained,) = found["explanations"]
    assert explained["decision"]["placed"]
    assert {one["verdict"] for one in explained["devices"]} == {"chosen", "would do"}
    assert explained["note"]
    assert found["fields"]["model"] == "40gib"
    assert "chat:" in found["stack"]
    gone = get(page, "/api/v1/models/nobody")
    assert (gone.status, "'nobody'" in gone.error) == (404, True)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"ad": []}, ("`ad`", "add, remove, layouts, may_move, may_stop")),
        ({"add": [], "Remove": [], "x": 1}, ("`Remove`, `x`",)),
        (
            {"add": [{"name": "a", "fields": {"model": "10gib"}, "replicas": 3}]},
            ("`replicas`", "in an entry of `add`", "fields"),
        ),
        ({"may_move": "false"}, ("true or false",)),
        ({"may_stop": 0}, ("true or false",)),
        ({"k" * 500: 1}, ("k" * 40,)),
        ({str(number): 1 for number in range(9)}, ("and 4 more",)),
        ({"add": [{"name": "a", "fields": {"model": "10gib", "contxt": 5}}]}, ("contxt",)),
    ],
)
def test_a_supposition_with_a_key_that_nothing_reads_is_refused_by_name(
    page: LocalPage, body: dict[str, Any], words: tuple[str, ...]
) -> None:
    answer = send(page, "POST", "/api/v1/what-if", body)
    assert answer.status == 400
    for word in words:
        assert word in answer.error
    assert "k" * 41 not in answer.error, "what a caller sent is not repeated at any length"


def test_a_supposition_of_nothing_is_what_is_there(page: LocalPage) -> None:
    answer = send(page, "POST", "/api/v1/what-if", {}).json
    assert (answer["fits"], answer["steps"], answer["refusals"]) == (True, [], [])
    assert answer["before"] == answer["after"]


def test_sizing_lists_smaller_variants_and_counts_copies_beside_what_runs(page: LocalPage) -> None:
    fits = send(page, "POST", "/api/v1/size", {"name": "new", "fields": {"model": "150gib"}}).json
    assert (fits["fits"], fits["copies"], fits["replaces"]) == (True, 2, [])
    again = send(page, "POST", "/api/v1/size", {"name": "chat", "fields": {"model": "150gib"}}).json
    assert (len(again["replaces"]), again["copies"]) == (1, 2), "its own copy would be replaced"
    large = send(page, "POST", "/api/v1/size", {"name": "new", "fields": {"model": "500gib"}}).json
    assert (large["fits"], large["copies"], large["decision"]["placed"]) == (False, 0, False)
    assert len(large["decision"]["reasons"]) == 2
    assert all(one["total_bytes"] < large["footprint"]["total_bytes"] for one in large["variants"])


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"name": "a", "fields": {"model": "10gib"}, "file": 1}, "`file`"),
        ({"name": 1, "fields": {"model": "10gib"}}, "name: text"),
        ({"name": "a", "fields": []}, "name: text"),
        ({"name": "a", "fields": {}}, "model"),
        ({"name": "a b", "fields": {"model": "10gib"}}, "'a b'"),
        (b"[1]", "not a JSON object"),
        (b"{", "not JSON"),
        (b" " * (1 << 20) + b"{}", "more than 1048576 bytes"),
    ],
)
def test_what_cannot_be_sized_is_refused_in_words(page: LocalPage, body: object, word: str) -> None:
    answer = send(page, "POST", "/api/v1/size", body)
    assert (answer.status, word in answer.error) == (400, True), answer.error


def test_any_character_is_understood_and_half_of_one_is_refused(page: LocalPage) -> None:
    answer = send(page, "POST", "/api/v1/size", {"name": "new", "fields": {"model": "10gib", "keep": "\N{COLLISION SYMBOL}"}})
    assert (answer.status, "\N{COLLISION SYMBOL}" in answer.error) == (400, True)
    for path in ("/api/v1/size", "/api/v1/what-if"):
        answer = send(page, "POST", path, {"remove": ["\ud83d"]})
        assert (answer.status, "not JSON" in answer.error) == (400, True)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"priority": "low"}, Change(priority=Priority.LOW)),
        ({"pinned": True}, Change(pinned=True)),
        ({"keep": "10m", "priority": "high"}, Change(priority=Priority.HIGH, keep_seconds=600)),
        ({"keep": "1500ms"}, Change(keep_seconds=1)),
    ],
)
def test_a_change_is_read_and_done_once(page: LocalPage, body: dict[str, Any], expected: Change) -> None:
    answer = send(page, "PATCH", "/api/v1/models/chat", body)
    assert (answer.status, page.done) == (200, [("change", "chat", expected)])
    assert answer.json["priority"] == (expected.priority or Priority.MEDIUM).value


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"priority": "urgent"}, "'urgent'"),
        ({"priority": ["high"]}, "['high']"),
        ({"pinned": True, "keep": "10m"}, "has no keep"),
        ({"pinned": False}, "needs a keep"),
        ({"pinned": "yes"}, "true or false"),
        ({"keep": 600}, "10m"),
        ({"keep": "soon"}, "soon"),
        ({}, "nothing to change"),
        ({"priority": "high", "prioritty": "low"}, "`prioritty`"),
    ],
)
def test_a_change_that_makes_no_sense_is_refused_and_not_done(page: LocalPage, body: dict[str, Any], word: str) -> None:
    answer = send(page, "PATCH", "/api/v1/models/chat", body)
    assert (answer.status, word in answer.error, page.done) == (400, True, [])


def test_paths_and_methods_that_there_are_not_get_json_too(page: LocalPage) -> None:
    for method, path, status in (("DELETE", "/api/v1/models/chat", 405), ("GET", "/api/v1/requests/x/prompt", 404)):
        answer = send(page, method, path, {})
        code = {404: "no_such_path", 405: "method_not_allowed"}[status]
        assert (answer.status, answer.json["error"]["code"]) == (status, code)


def test_only_one_who_may_write_sleeps_wakes_or_changes_a_model(page: LocalPage) -> None:
    calls: tuple[tuple[str, str, object], ...] = (
        ("POST", "/sleep", {}),
        ("POST", "/wake", {}),
        ("PATCH", "", {"priority": "low"}),
    )
    for other in (
        stranger(page, address="10.0.0.7"),
        stranger(page, headers=(HOST,)),  # not made by the page
        stranger(page, headers=(HOST, PAGE, (b"origin", b"http://evil.example"))),
    ):
        for method, path, body in calls:
            assert send(page, method, f"/api/v1/models/chat{path}", body, other).status in (401, 403)
    assert page.done == []
    for method, path, body in calls:
        assert send(page, method, f"/api/v1/models/chat{path}", body).status == 200
    assert [what for what, _, _ in page.done] == ["sleep", "wake", "change"]


def test_the_session_reports_why_a_browser_may_not_write(page: LocalPage) -> None:
    assert get(page, "/api/v1/session").json["write"]
    without_link = stranger(page)
    session = get(page, "/api/v1/session", without_link).json
    assert (session["read"], session["write"]) == (True, False)
    assert "aimgpu web" in session["reason"]
    with_token = get(page, "/api/v1/session", without_link.with_token(TOKEN)).json
    assert (with_token["write"], with_token["reason"]) == (True, None)
    away = get(page, "/api/v1/session", stranger(page, address="10.0.0.7")).json
    assert (away["read"], away["write"]) == (False, False)


@pytest.mark.parametrize("path", ["state", "timeline", "stack", "catalogue", "models/chat"])
def test_nothing_is_shown_to_another_machine_without_the_token(page: LocalPage, path: str) -> None:
    away = stranger(page, address="10.0.0.7")
    assert get(page, f"/api/v1/{path}", away).status == 401
    assert get(page, f"/api/v1/{path}", away.with_token(TOKEN)).status == 200


def test_prompts_are_for_the_daemons_user_alone(page: LocalPage) -> None:
    page.activity.finished(finished("a secret"))
    assert get(page, "/api/v1/requests/1/prompt").json == {"prompt": "a secret"}
    assert get(page, "/api/v1/requests/2/prompt").json == {"prompt": None}
    assert get(page, "/api/v1/requests/1/prompt", stranger(page)).status == 401
    assert get(page, "/api/v1/requests/x/prompt").status == 404


def test_a_request_of_the_page_reaches_the_control_api_with_the_daemons_token(page: LocalPage) -> None:
    assert send(page, "POST", "/api/v1/release", {"names": ["chat"]}).status == 200
    assert (b"authorization", f"Bearer {TOKEN}".encode()) in page.passed_on[0]["headers"]
    other = stranger(page, headers=(HOST,))
    assert send(page, "POST", "/api/v1/release", {"names": ["chat"]}, other).status == 401
    opened = stranger(page, headers=[one for one in page.browser.headers if one != PAGE])
    assert send(page, "POST", "/api/v1/release", {"names": ["chat"]}, opened).status == 403, "a link on another site"
    assert len(page.passed_on) == 1
    send(page, "POST", "/api/v1/release", {"names": ["chat"]}, other.with_token("wrong"))
    given = [value for name, value in page.passed_on[1]["headers"] if name == b"authorization"]
    assert given == [b"Bearer wrong"], "one that came with a token is judged by that token"


@pytest.mark.parametrize("seconds", ["0", "-5", "3601", "nan", "inf", "an hour", ""])
def test_a_timeline_of_no_possible_length_is_refused(page: LocalPage, seconds: str) -> None:
    answer = get(page, f"/api/v1/timeline?seconds={seconds}")
    assert (answer.status, "seconds" in answer.error) == (400, True)


def test_the_timeline_has_who_was_served_and_who_waited_within_it(page: LocalPage) -> None:
    (instance,) = page.controller.instances()
    long_ago = finished(None)
    page.activity.add(long_ago, time.time() - 1000)
    waited = finished(None)
    waited.queued_seconds, waited.seconds, waited.instance_id = 30.0, 40.0, instance.id
    page.activity.add(waited, time.time())
    found = get(page, "/api/v1/timeline?seconds=35").json
    (wait,) = found["waits"]
    assert (wait["model"], wait["number"], wait["sent"]) == ("chat", 2, True)
    assert wait["began"] == found["since"], "what began before is cut"
    assert wait["ended"] <= found["now"]


def test_assets_are_packed_kept_and_not_sent_twice(page: LocalPage) -> None:
    for path in asset_names():
        plain = get(page, path)
        packed = get(page, path, stranger(page, headers=(HOST, (b"accept-encoding", b"br, gzip"))))
        assert (plain.status, packed.headers["content-encoding"]) == (200, "gzip")
        assert gzip.decompress(packed.body) == plain.body
        tag = plain.headers["etag"].encode()
        again = get(page, path, stranger(page, headers=(HOST, (b"if-none-match", tag))))
        assert (again.status, again.body) == (304, b"")
        assert send(page, "POST", path, {}).status == 405


def test_every_answer_carries_the_headers_that_keep_other_sites_out(page: LocalPage) -> None:
    paths = ("/", "/page/app.js", "/api/v1/state", "/api/v1/stack", "/api/v1/models/nobody", "/api/v1/timeline?seconds=0")
    for path in paths:
        answer = get(page, path)
        assert SAFETY_HEADERS.items() <= answer.headers.items(), path
    assert get(page, "/api/v1/state").headers["cache-control"] == "no-store"


def test_the_catalogue_and_the_stack_file_are_what_can_be_and_what_is_deployed(page: LocalPage) -> None:
    catalogue = get(page, "/api/v1/catalogue").json
    assert [one["id"] for one in catalogue["models"]] == ["10gib"]
    assert [one["name"] for one in catalogue["engines"]] == ["llamacpp"]
    stack = get(page, "/api/v1/stack")
    assert stack.headers["content-type"] == "application/yaml"
    assert b"chat:" in stack.body
    assert json.loads(send(page, "POST", "/api/v1/what-if", {"remove": ["chat"]}).body)["fits"]


def test_models_are_found_by_any_part_of_their_name_in_the_form_that_an_engine_here_reads(page: LocalPage) -> None:
    (first, *_) = get(page, "/api/v1/models/search?q=qwen3:8b").json["models"]
    assert (first["name"], first["model"], first["engine"]) == ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B-GGUF:Q4_K_M", "llamacpp")
    assert 4 * GIB < first["download_bytes"] < 6 * GIB
    assert (first["memory_bytes"], first["runs_here"], first["reason"]) == (10 * GIB, True, None)
    small = get(page, "/api/v1/models/search?q=").json["models"]
    assert small[0]["name"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert get(page, "/api/v1/models/search?q=no-such-model").json["models"] == []
    assert get(page, "/api/v1/models/search").status == 404  # the drawer of a model that is called so


def test_a_model_that_no_engine_here_reads_is_found_with_the_reason(page: LocalPage) -> None:
    (first, *_) = get(page, "/api/v1/models/search?q=DeepSeek-V3-0324").json["models"]
    assert (first["model"], first["engine"]) == ("deepseek-ai/DeepSeek-V3-0324", None)
