import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from aimgpu.monitoring.engine_metrics import ENGINE_NAMES, EngineMetrics, EngineTarget, fetch_metrics, map_names
from aimgpu.monitoring.metrics import METRICS

VLLM = """# HELP vllm:num_requests_running Number of requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 7.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:prompt_tokens_total{engine="0",model_name="m"} 1234.0
vllm:generation_tokens_total{engine="0",model_name="m"} 5.0e+03
vllm:num_preemptions_total{engine="0",model_name="m"} NaN
"""
LLAMACPP = """llamacpp:prompt_tokens_total 10
llamacpp:tokens_predicted_total 20
llamacpp:requests_processing 1
llamacpp:requests_deferred 4
nonsense that is no metric
"""


def target(url: str, engine: str = "vllm", key: str = "k") -> EngineTarget:
    return EngineTarget(instance_id="chat-0", model="chat", engine=engine, url=url, api_key=key)


def test_engines_own_names_become_ours_and_series_are_summed() -> None:
    assert map_names("vllm", VLLM) == {
        "aim_engine_requests_running": 5.0,
        "aim_engine_requests_waiting": 7.0,
        "aim_engine_kv_cache_usage_ratio": 0.25,
        "aim_engine_prompt_tokens": 1234.0,
        "aim_engine_generation_tokens": 5000.0,
    }
    assert map_names("llamacpp", LLAMACPP) == {
        "aim_engine_prompt_tokens": 10.0,
        "aim_engine_generation_tokens": 20.0,
        "aim_engine_requests_running": 1.0,
        "aim_engine_requests_waiting": 4.0,
    }


def test_older_names_of_an_engine_are_known_too() -> None:
    assert map_names("vllm", "vllm:gpu_cache_usage_perc 0.5\n") == {"aim_engine_kv_cache_usage_ratio": 0.5}


def test_every_mapped_name_is_documented() -> None:
    for names in ENGINE_NAMES.values():
        assert set(names) <= set(METRICS)


@pytest.fixture
def engine() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            allowed = self.headers.get("Authorization") == "Bearer k"
            body = VLLM.encode() if allowed else b""
            self.send_response(200 if allowed else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_an_engine_is_read_with_its_key_and_one_without_metrics_has_no_series(engine: str) -> None:
    readings = EngineMetrics(lambda: [target(engine), target(engine, key="other"), target(engine, engine="ollama")]).refresh()
    assert [(one.up, one.values["aim_engine_requests_running"]) for one in readings] == [(True, 5.0)]
    assert fetch_metrics(target(engine, key="other")) is None


def test_a_dead_engine_is_down_and_asking_never_waits() -> None:
    started, go_on = threading.Event(), threading.Event()

    def fetch(_: EngineTarget) -> str | None:
        started.set()
        go_on.wait()
        raise ConnectionRefusedError

    metrics = EngineMetrics(lambda: [target("http://127.0.0.1:9")], interval_seconds=0.0, fetch=fetch)
    assert metrics.read() == (), "nothing was read yet, and nobody waits for it"
    started.wait()
    assert metrics.read() == ()
    go_on.set()
    (reading,) = metrics.refresh()
    assert not reading.up
