"""One model under several names, with Ollama's tag or without, and for callers that name none."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from tests.gateway.calling import CHAT, call, chat, eventually
from tests.gateway.conftest import Serve
from tests.gateway.scripted_engine import Asked, ScriptedEngine, answer_json, polite

from aimgpu.errors import InvalidRequest
from aimgpu.gateway.auth import Caller, KeyTable
from aimgpu.gateway.forms import name_model, read_form
from aimgpu.gateway.routes import Arrival
from aimgpu.keyfile import hash_key

FORM = "multipart/form-data; boundary=x"
NAMES: dict[str, Any] = {"aliases": ("gpt-4o-mini", "qwen3:8b"), "names": ("chat",)}


def form(*fields: tuple[str, str], file: bytes = b"RIFF") -> bytes:
    parts = [f'--x\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode() for name, value in fields]
    sound = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n%b\r\n' % file
    return b"".join([*parts, sound, b"--x--\r\n"])


@pytest.mark.parametrize("name", ["chat", "chat:latest", "gpt-4o-mini", "gpt-4o-mini:latest", "qwen3:8b"])
def test_every_name_finds_the_model_and_its_engine_gets_the_one_it_knows(
    serve: Serve, engine: ScriptedEngine, name: str
) -> None:
    asked: list[Asked] = []

    async def keep(engine: ScriptedEngine, one: Asked) -> None:
        asked.append(one)
        await polite(engine, one)

    engine.script = keep
    served = serve()
    served.routes.serve("chat", engine, **NAMES)
    assert chat(served.port, model=name).status == 200
    assert call(served.port, "POST", "/api/chat", CHAT | {"model": name, "stream": False}).json["model"] == name
    assert call(served.port, "POST", "/v1/messages", CHAT | {"model": name, "max_tokens": 5}).status == 200
    assert [one.fields["model"] for one in asked] == ["chat"] * 3
    assert {record.model for record in served.observer.wait_for(3)} == {"chat"}


def test_a_name_of_none_is_told_what_there_is(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve()
    served.routes.serve("chat", engine, **NAMES)
    refused = chat(served.port, model="gpt-4o-mino")
    assert refused.status == 404
    assert "gpt-4o-mini" in refused.error["message"]


@pytest.mark.parametrize("given", [{}, {"model": ""}, {"model": None}])
def test_a_caller_that_names_no_model_gets_the_default_or_is_refused(
    serve: Serve, engine: ScriptedEngine, given: dict[str, Any]
) -> None:
    served = serve()
    served.routes.serve("other", engine, names=("other",))
    body = {"messages": CHAT["messages"], "max_tokens": 5, "stream": False} | given
    paths = ("/v1/chat/completions", "/v1/messages", "/api/chat", "/v1/responses")
    asked = [body | ({"input": "hi"} if path == "/v1/responses" else {}) for path in paths]
    refused = [call(served.port, "POST", path, one) for path, one in zip(paths, asked, strict=True)]
    assert [one.status for one in refused] == [400] * 4
    served.routes.serve("chat", engine, default=True, **NAMES)
    answers = [call(served.port, "POST", path, one) for path, one in zip(paths, asked, strict=True)]
    assert [one.status for one in answers] == [200] * 4
    assert answers[2].json["model"] == "chat"
    assert {record.model for record in served.observer.wait_for(4)} == {"chat"}


def test_the_list_shows_the_other_names(serve: Serve, engine: ScriptedEngine) -> None:
    served = serve()
    served.routes.serve("chat", engine, default=True, **NAMES)
    (entry,) = call(served.port, "GET", "/v1/models").json["data"]
    assert (entry["id"], entry["aliases"], entry["default"]) == ("chat", ["gpt-4o-mini", "qwen3:8b"], True)
    assert call(served.port, "GET", "/v1/models/gpt-4o-mini").json == entry


@pytest.mark.parametrize("allowed", ["chat", "gpt-4o-mini"])
def test_a_key_for_one_name_is_good_for_the_others_of_the_model_alone(
    serve: Serve, engine: ScriptedEngine, allowed: str
) -> None:
    served = serve(keys=KeyTable({hash_key("k" * 40): Caller(name="ann", models=frozenset({allowed}))}))
    served.routes.serve("chat", engine, **NAMES)
    served.routes.serve("other", engine, default=True)
    key = {"authorization": f"Bearer {'k' * 40}"}
    assert {chat(served.port, key, model=name).status for name in ("chat", "gpt-4o-mini", "chat:latest")} == {200}
    assert {chat(served.port, key, model=name).status for name in ("other", "")} == {403}


def test_a_form_goes_to_the_engine_with_the_name_it_knows(serve: Serve, engine: ScriptedEngine) -> None:
    asked: list[bytes] = []

    async def keep(_: ScriptedEngine, one: Asked) -> None:
        asked.append(one.body)
        await answer_json(one, {"text": "hello"})

    engine.script = keep
    served = serve()
    served.routes.serve("chat", engine, default=True, **NAMES)
    forms = [form(("model", name)) for name in ("chat", "gpt-4o-mini")] + [form(("language", "en"))]
    for body in forms:
        assert call(served.port, "POST", "/v1/audio/transcriptions", body, {"content-type": FORM}).json == {"text": "hello"}
    assert asked[0] == forms[0]
    assert asked[1] == forms[0]
    assert read_form(FORM.encode(), asked[2]) == {"language": "en", "model": "chat"}
    assert asked[2].endswith(forms[2])


def test_a_file_that_looks_like_a_field_is_left_alone() -> None:
    body = form(("model", "a"), file=b'name="model"\r\n\r\nb')
    assert name_model(FORM.encode(), body, "longer").replace(b"longer", b"a") == body


def test_a_form_with_two_models_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="twice"):
        read_form(FORM.encode(), form(("model", "a"), ("model", "b")))


def test_a_request_that_was_held_gets_the_name_that_its_engine_gave_when_it_came_up(
    serve: Serve, engine: ScriptedEngine
) -> None:
    asked: list[str] = []

    async def keep(engine: ScriptedEngine, one: Asked) -> None:
        is_form = one.body.startswith(b"--")
        asked.append(read_form(FORM.encode(), one.body)["model"] if is_form else str(one.fields["model"]))
        await (answer_json(one, {"text": "hello"}) if is_form else polite(engine, one))

    engine.script = keep
    served = serve()
    served.routes.put("chat", "loading", arrival=Arrival(slots=8, seconds=None), names_more=True, aliases=("gpt",))
    calls = [("/v1/chat/completions", CHAT | {"model": name}) for name in ("chat", "gpt", "chat:second", "chat:third")]
    calls += [("/api/chat", CHAT | {"model": "chat:second", "stream": False})]
    speech = [form(("model", name)) for name in ("gpt", "chat:second")]
    with ThreadPoolExecutor(8) as pool:
        held = [pool.submit(call, served.port, "POST", path, body) for path, body in calls]
        held += [
            pool.submit(call, served.port, "POST", "/v1/audio/transcriptions", body, {"content-type": FORM}) for body in speech
        ]
        assert eventually(lambda: served.gateway.slots.queued("chat") == len(held))
        served.routes.serve("chat", engine, names=("first", "second"), aliases=("gpt", "chat:second"), slots=8)
        assert [one.result().status for one in held] == [200, 200, 200, 404, 200, 200, 200]
    assert sorted(asked) == ["first"] * 3 + ["second"] * 3


def test_each_replica_is_asked_by_the_name_that_it_gave(serve: Serve, engine: ScriptedEngine) -> None:
    asked: list[str] = []

    async def keep(engine: ScriptedEngine, one: Asked) -> None:
        asked.append(str(one.fields["model"]))
        await polite(engine, one)

    engine.script = keep
    served = serve()
    served.routes.serve("chat", engine, engine)
    (model,) = served.routes.list()
    for first in model.backends:
        backends = [replace(one, name=one.instance_id) for one in model.backends if one == first]
        served.routes.put("chat", "ready", backends=tuple(backends))
        assert chat(served.port).status == 200
    assert asked == ["chat-0", "chat-1"]
