"""`make test-wide ARGS=coverage-dialects`: inputs made up by what they reach in the code (atheris), for FUZZ_SECONDS (1200).

Three harnesses: `dialects` (bodies of callers), `engines` (answers and streams of engines), `objects` (what others write into
the API server). An exception that none of them should raise, a status 500, or a good object that is lost with a bad one ends
the run and keeps the input beside the record.
"""

import argparse
import importlib
import json
import logging
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.wide.records import RESULTS, ROOT, Recorder

CORPUS = Path(__file__).parent / "corpus"
_LARGEST_INPUT = 4096
_MOST_KEPT = 40
_STATUS = re.compile(r"#(\d+)\s+\S+\s+cov: (\d+) ft: (\d+) corp: (\d+)")
_SECONDS_OF_ONE = 20  # an input that takes longer is a finding
WORDS = (
    *('"messages"', '"role"', '"content"', '"tools"', '"tool_calls"', '"function"', '"arguments"', '"input"', '"type"'),
    *('"input_text"', '"tool_use"', '"tool_result"', '"image_url"', '"stream"', '"stop"', '"n"', '"response_format"'),
    *('"json_schema"', '"choices"', '"delta"', '"message"', '"usage"', '"error"', '"finish_reason"', '"index"'),
    *("data: ", "[DONE]", "null", "true", "1e9", "-1", "\\\\u0000", "\\\\ud800", "aim.amd.com/", "Ki"),
)


def _dialects() -> tuple[Callable[[bytes], None], list[bytes]]:
    from tests.gateway.loop_time import Served, serve_once  # noqa: PLC0415 - what is imported here is instrumented
    from tests.gateway.test_loop_time import BODIES, CALLS  # noqa: PLC0415

    paths = sorted({path for path, _ in BODIES.values()} | {*CALLS, "/v1/audio/transcriptions"})

    def once(data: bytes) -> None:
        if len(data) < 2:
            return
        path, form = paths[data[0] % len(paths)], bool(data[1] & 1)
        kind = b"multipart/form-data; boundary=B" if form else b"application/json"
        spent = serve_once(Served(path=path, body=data[2:], content_type=kind, engine="vllm" if data[1] & 2 else "llamacpp"))
        assert 200 <= spent.status < 600, spent.status
        assert spent.status != 500

    seeds = [bytes([at, 0]) + json.dumps({"model": "chat", **CALLS.get(path, {})}).encode() for at, path in enumerate(paths)]
    tools = {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "tool_choice": "required",
    }
    chat = {"model": "chat", "messages": [{"role": "user", "content": [{"type": "text", "text": "?"}]}], "stream": True}
    seeds += [bytes([at, 2]) + json.dumps(chat | tools).encode() for at in range(len(paths))]
    return once, [*seeds, bytes([0, 1]) + b'--B\r\ncontent-disposition: form-data; name="model"\r\n\r\nchat\r\n--B--\r\n']


def _engines() -> tuple[Callable[[bytes], None], list[bytes]]:
    from tests.gateway.loop_time import ANSWER, STREAM, Served, serve_once  # noqa: PLC0415
    from tests.gateway.test_loop_time import CALLS, delta  # noqa: PLC0415

    paths = [*CALLS, "/v1/completions", "/api/embed", "/v1/tokenize", "/v1/rerank"]
    extra: list[dict[str, Any]] = [{}, {"n": 2}, {"stop": ["a"]}]

    def once(data: bytes) -> None:
        if len(data) < 4:
            return
        path, streamed, size = paths[data[0] % len(paths)], bool(data[1] & 1), data[2] or 256
        fields = {"model": "chat", "prompt": "?", "input": "?", "query": "?", "documents": ["?"], "stream": streamed}
        body = json.dumps(fields | CALLS.get(path, {}) | extra[data[3] % len(extra)]).encode()
        text = data[4:]
        served = Served(
            path=path,
            body=body,
            engine="vllm" if data[1] & 2 else "llamacpp",
            answer=[text[at : at + size] for at in range(0, len(text), size)],
            answer_type=STREAM if streamed else b"application/json",
        )
        spent = serve_once(served)
        assert 200 <= spent.status < 600, spent.status
        assert spent.status != 500

    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}
    events = delta(role="assistant") + delta(content="ab") + delta(tool_calls=[call]) + b"data: [DONE]\n\n"
    kinds = [bytes([at, kind, 50, more]) for at in range(len(paths)) for kind in (0, 1, 3) for more in range(len(extra))]
    return once, [kind + (events if kind[1] & 1 else ANSWER) for kind in kinds]


def _objects() -> tuple[Callable[[bytes], None], list[bytes]]:
    from tests.kubernetes.page_objects import model, node, pod, share  # noqa: PLC0415
    from tests.kubernetes.test_foreign_objects import KEYS, WAITING  # noqa: PLC0415

    from aimgpu.errors import InvalidQuantity  # noqa: PLC0415
    from aimgpu.kubernetes.api.quantities import parse_quantity  # noqa: PLC0415
    from aimgpu.kubernetes.cluster.operator.pending_pods import find_pending  # noqa: PLC0415
    from aimgpu.kubernetes.models.gateway.served_models import ClusterState, devices_of, make_routes, read_model  # noqa: PLC0415
    from aimgpu.kubernetes.models.page.observed import ClusterObjects, observe  # noqa: PLC0415
    from aimgpu.kubernetes.models.serving.model_status import describe_models  # noqa: PLC0415

    wholes = [share("odd-1"), node("n2"), pod("odd-1", served="odd"), WAITING]

    def annotated(text: str, key: str) -> None:
        odd = model("odd")
        odd["metadata"]["annotations"] = {key: text}
        items = [model("chat"), odd]
        routes = make_routes(ClusterState(models=[read_model(item) for item in items]))
        assert {key.object_name for _, key in routes} == {"chat", "odd"}
        objects = ClusterObjects(nodes=[node()], models=items, pods=[pod("chat-1")], shares=[share("chat-1")])
        assert "chat" in {one.name for one in observe(objects, cluster="all", taken_at=1.0).deployments}
        assert "chat" in {row["name"] for row in describe_models(items, [pod("chat-1")], [])}
        with suppress(InvalidQuantity):
            assert abs(parse_quantity(text)) < 10**31

    def damaged(which: int, place: int, value: object) -> None:
        odd = json.loads(json.dumps(wholes[which]))
        places = list(_places(odd))
        parent, key = places[place % len(places)]
        parent[key] = value
        if wholes[which] is WAITING:
            assert "team/p" in {one.name for one in find_pending([odd, WAITING], {}, lambda _: 0.0, 1.0)}
            return
        others = [[share("chat-1")], [node()], [pod("chat-1")]]
        others[which].insert(0, odd)
        objects = ClusterObjects(nodes=others[1], models=[model()], pods=others[2], shares=others[0])
        assert "n1/gpu-0" in {device.id for device in observe(objects, cluster="all", taken_at=1.0).devices}
        assert devices_of(others[0])["team", "chat-1"].id == "n1/gpu-0"

    def once(data: bytes) -> None:
        if len(data) < 3:
            return
        text = data[2:].decode("utf-8", "surrogateescape")
        if data[0] % 2:
            annotated(text, KEYS[data[1] % len(KEYS)])
            return
        with suppress(ValueError, RecursionError):  # no JSON: the API server sends none
            value = json.loads(text)
            damaged(data[0] // 2 % len(wholes), data[1], value)

    values = (b"4", b"-1", b'"1e999"', b'{"ttft_p95": "500ms"}', b"{ttft_p95: 500ms}", b"[[{}]]", b"10m", b"null", b"high")
    return once, [bytes([first, second]) + value for first in range(8) for second in range(0, 24, 3) for value in values]


def _places(value: Any, *, top: bool = True) -> Iterator[tuple[Any, Any]]:
    """Each place of a value within the object; its metadata is checked by the API server."""
    inner = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    for key, each in inner:
        if not (top and key == "metadata"):
            yield value, key
            yield from _places(each, top=False)


HARNESSES = {"dialects": _dialects, "engines": _engines, "objects": _objects}


@dataclass(frozen=True, slots=True)
class Counts:
    """What libFuzzer printed last."""

    executions: int
    coverage: int  # places of the code that were reached
    features: int
    corpus: int


def read_counts(text: str) -> Counts | None:
    """None: it ended before it ran anything."""
    found = _STATUS.findall(text)
    return Counts(*map(int, found[-1])) if found else None


def fuzz(name: str, arguments: list[str]) -> None:
    """Does not return. In a process of its own: libFuzzer ends it."""
    atheris: Any = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["aimgpu"]):
        once, seeds = HARNESSES[name]()
    logging.disable()
    folder = Path(arguments[0])
    for number, seed in enumerate([*seeds, *read_corpus(name)]):
        (folder / f"seed-{number}").write_bytes(seed)
    atheris.Setup([sys.argv[0], *arguments], once)
    atheris.Fuzz()


def read_corpus(name: str) -> list[bytes]:
    """Inputs of runs before this, each of which reached something that the ones before it had not."""
    path = CORPUS / f"{name}.json"
    return [one.encode("latin-1") for one in json.loads(path.read_text())] if path.exists() else []


def _keep(name: str, inputs: Path) -> None:
    """The shortest of the inputs that reached something new, beside what was kept before."""
    found = [path.read_bytes() for path in inputs.iterdir() if not path.name.startswith("seed-")]
    kept = sorted({*read_corpus(name), *found}, key=lambda data: (len(data), data))[:_MOST_KEPT]
    CORPUS.mkdir(exist_ok=True)
    (CORPUS / f"{name}.json").write_text(json.dumps([one.decode("latin-1") for one in kept], indent=0) + "\n")


def run(name: str, seconds: int) -> int:
    """Fuzz, keep the inputs that reach something new where there are few, and write the record."""
    recorder = Recorder(part=f"coverage-{name}")
    with tempfile.TemporaryDirectory() as folder:
        inputs = Path(folder) / "inputs"
        inputs.mkdir()
        words = Path(folder) / "words"
        words.write_text("".join(f'"{word.replace(chr(34), chr(92) + chr(34))}"\n' for word in WORDS))
        options = [
            f"-max_total_time={seconds}",
            f"-max_len={_LARGEST_INPUT}",
            f"-timeout={_SECONDS_OF_ONE}",
            "-rss_limit_mb=4096",
        ]
        RESULTS.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "tests.wide.coverage_fuzz", name, "--child", str(inputs), f"-dict={words}"]
        command += [*options, f"-artifact_prefix={RESULTS}/{name}-", "-print_final_stats=1"]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        if done.returncode == 0:
            _keep(name, inputs)
    said = done.stdout.decode(errors="replace")
    counts = read_counts(said)
    if done.returncode or counts is None:
        sys.stdout.write(said[-5000:])
    found = {
        "executions": counts.executions if counts else 0,
        "coverage": counts.coverage if counts else 0,
        "features": counts.features if counts else 0,
        "corpus": counts.corpus if counts else 0,
    }
    record = recorder.write(exit_status=done.returncode, found=found, versions={"atheris": version("atheris")})
    sys.stdout.write(json.dumps(record) + "\n")
    return done.returncode or int(counts is None)


def main() -> int:
    """0: nothing was found."""
    parser = argparse.ArgumentParser(prog="tests.wide.coverage_fuzz", description=__doc__)
    parser.add_argument("harness", choices=HARNESSES)
    parser.add_argument("--seconds", type=int, default=1200)
    parser.add_argument("--child", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child is not None:
        fuzz(given.harness, given.child)
    return run(given.harness, given.seconds)


if __name__ == "__main__":
    sys.exit(main())
