import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aimgpu.domain import Grant, Level, Priority
from aimgpu.engines.health import ask
from aimgpu.engines.launchers.process import ProcessLauncher
from aimgpu.engines.protocols import HealthState, LaunchRequest, Sleeper
from aimgpu.engines.vllm.door.aimgpu_vllm_door import AskKey
from aimgpu.engines.vllm.engine import VllmEngine
from aimgpu.engines.vllm.log import read_failure, read_load_percent
from aimgpu.errors import EngineFailed

MakeRequest = Callable[..., LaunchRequest]
WaitUntil = Callable[..., None]
GIB = 1 << 30


def start(launcher: ProcessLauncher, engine: VllmEngine, request: LaunchRequest) -> None:
    launcher.start(request.instance.id, engine.command(request), request.run_directory)


def test_the_command_line_follows_the_footprint(make_request: MakeRequest, tmp_path: Path) -> None:
    request = make_request(
        model="Qwen/Qwen2.5-7B-Instruct",
        flags={"kv_cache_memory_bytes": "4294967296", "--enforce-eager": "", "max-num-seqs": "8"},
    )
    command = VllmEngine().command(request)
    assert command.argv[:3] == ("vllm", "serve", "Qwen/Qwen2.5-7B-Instruct")
    told = dict(zip(command.argv[3:-1], command.argv[4:], strict=True))
    assert told["--host"] == "127.0.0.1"
    assert told["--served-model-name"] == "chat"
    assert told["--scheduling-policy"] == "priority"
    assert told["--kv-cache-memory-bytes"] == "4294967296"
    assert (told["--max-model-len"], told["--max-num-seqs"]) == ("512", "8")
    assert "--enforce-eager" in command.argv
    assert "s3cret" not in " ".join(command.argv)
    assert command.secrets == {"VLLM_API_KEY": "s3cret"}
    assert command.environment["HIP_VISIBLE_DEVICES"] == "0"
    local = VllmEngine().command(make_request(model_path=tmp_path))
    assert local.argv[2] == str(tmp_path)


@pytest.mark.parametrize(
    ("version", "sees_a_gpu", "passes"), [("0.32.0", True, True), ("0.32.0+cpu", True, True), ("0.32.0+cpu", False, False)]
)
def test_the_build_for_the_cpu_without_a_gpu_gets_no_flags_of_gpus(
    stand_ins: Path, make_request: MakeRequest, version: str, *, sees_a_gpu: bool, passes: bool
) -> None:
    (stand_ins.parent / f"lib/python3.12/site-packages/vllm-{version}.dist-info").mkdir(parents=True)
    flags = {"kv-cache-memory-bytes": "4294967296", "max-num-seqs": "8", "cudagraph-capture-sizes": "1 2 4"}
    request = replace(make_request(flags=flags), environment={"ROCR_VISIBLE_DEVICES": "0"} if sees_a_gpu else {})
    words = VllmEngine().command(request).argv
    assert {"--kv-cache-memory-bytes", "--max-num-seqs", "--max-model-len"} <= set(words)
    assert {name in words for name in ("--gpu-memory-utilization", "--cudagraph-capture-sizes")} == {passes}


def grant(memory_bytes: int) -> Grant:
    return Grant(
        id="g",
        instance_id="chat-0",
        deployment="chat",
        node="n",
        device_id="d",
        partition_id="d/whole-0",
        memory_bytes=memory_bytes,
        compute_ppm=None,
        priority=Priority.MEDIUM,
        level=Level.NONE,
    )


@pytest.mark.parametrize(("granted", "part"), [(40 * GIB, "0.5000"), (26 * GIB, "0.3250"), (80 * GIB, "1.0000"), (1, "0.0001")])
def test_what_must_be_free_at_the_start_is_what_was_granted(make_request: MakeRequest, granted: int, part: str) -> None:
    """vLLM's own default, 0.9 of the GPU, would keep a second engine from ever starting."""
    request = make_request(flags={"--kv-cache-memory-bytes": "1"})
    instance = replace(request.instance, grants=(grant(granted),))
    command = VllmEngine().command(replace(request, instance=instance, partition_memory_bytes=80 * GIB))
    assert command.argv[command.argv.index("--gpu-memory-utilization") + 1] == part
    unknown = VllmEngine().command(request)
    assert unknown.argv[unknown.argv.index("--gpu-memory-utilization") + 1] == "0.01"


@pytest.mark.parametrize("name", ["--cuda-graph-sizes", "--cudagraph-capture-sizes"])
def test_graph_sizes_go_to_the_engine_by_the_name_that_the_footprint_gives(make_request: MakeRequest, name: str) -> None:
    """The sizing knows the version, and what that version calls it."""
    command = VllmEngine().command(make_request(flags={name: "1 2 4"}))
    at = command.argv.index(name)
    assert command.argv[at + 1 : at + 4] == ("1", "2", "4")


@pytest.mark.usefixtures("stand_ins")
def test_it_becomes_ready_with_a_first_token_and_sleeps_and_wakes(
    launcher: ProcessLauncher, make_request: MakeRequest, wait_until: WaitUntil
) -> None:
    engine, request = VllmEngine(), replace(make_request(), may_sleep=True)
    assert isinstance(engine, Sleeper)

    def state() -> HealthState:
        return engine.check_health(request.run_directory, "s3cret").state

    start(launcher, engine, request)
    wait_until(lambda: state() is HealthState.READY, "vLLM is ready")
    endpoint = engine.check_health(request.run_directory, "s3cret").endpoint
    served = ask(f"{endpoint}/served", api_key="s3cret")
    assert served is not None
    assert served.read_json() == {"served": 1}  # asked once, not at every look
    engine.sleep(request.run_directory, "s3cret")
    assert state() is HealthState.SLEEPING
    engine.wake(request.run_directory, "s3cret")
    assert state() is HealthState.READY
    served = ask(f"{endpoint}/served", api_key="s3cret")
    assert served is not None
    assert served.read_json() == {"served": 2}, "ready again means that a token came again"
    engine.sleep(request.run_directory, "s3cret", deep=True)
    engine.wake(request.run_directory, "s3cret")
    assert state() is HealthState.READY
    turns = [line.strip() for line in (request.run_directory / "sleeps").read_text().splitlines()]
    assert turns == [
        "/sleep?level=1 {}",
        "/wake_up {}",
        "/sleep?level=2 {}",
        "/wake_up?tags=weights {}",
        '/collective_rpc {"method": "reload_weights"}',
        "/wake_up?tags=kv_cache {}",
    ]


@pytest.mark.usefixtures("stand_ins")
def test_no_path_but_health_answers_without_the_key(
    launcher: ProcessLauncher, make_request: MakeRequest, wait_until: WaitUntil
) -> None:
    """vLLM itself asks for it under /v1 alone."""
    engine, request = VllmEngine(), replace(make_request(), may_sleep=True)
    start(launcher, engine, request)
    wait_until(lambda: engine.check_health(request.run_directory, "s3cret").state is HealthState.READY, "vLLM is ready")
    endpoint = engine.check_health(request.run_directory, "s3cret").endpoint

    def status(path: str, key: str | None, content: dict[str, object] | None = None) -> int:
        answer = ask(f"{endpoint}{path}", api_key=key, content=content)
        assert answer is not None
        return answer.status

    for path in ("/sleep?level=1", "/collective_rpc", "/wake_up", "/invocations", "/pause", "/v1/completions"):
        assert {status(path, key, {}) for key in (None, "", "s3cre", "s3cret2", "S3CRET")} == {401}, path
    assert {status(path, None) for path in ("/is_sleeping", "/metrics", "/v1/models", "/served")} == {401}
    assert status("/health", None) == 200
    assert status("/is_sleeping", "s3cret") == 200
    assert not (request.run_directory / "sleeps").exists()


def test_the_door_lets_start_pass_and_refuses_sockets_and_a_server_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[str] = []
    sent: list[dict[str, Any]] = []

    async def application(scope: dict[str, Any], *_: object) -> None:
        passed.append(scope["type"])

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> None:
        return

    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(KeyError):
        AskKey(application)
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    door = AskKey(application)
    asyncio.run(door({"type": "lifespan"}, receive, send))
    asyncio.run(door({"type": "websocket", "path": "/v1/realtime", "headers": []}, receive, send))
    allowed = [(b"host", b"x"), (b"authorization", b"Bearer s3cret")]
    asyncio.run(door({"type": "websocket", "path": "/v1/realtime", "headers": allowed}, receive, send))
    assert (passed, sent) == (["lifespan", "websocket"], [{"type": "websocket.close", "code": 1008}])


@pytest.mark.usefixtures("stand_ins")
def test_without_sleep_mode_it_says_so(launcher: ProcessLauncher, make_request: MakeRequest, wait_until: WaitUntil) -> None:
    engine, request = VllmEngine(), make_request()
    start(launcher, engine, request)
    wait_until(lambda: engine.check_health(request.run_directory, "s3cret").state is HealthState.READY, "vLLM is ready")
    with pytest.raises(EngineFailed, match="answered 404") as caught:
        engine.sleep(request.run_directory, "s3cret")
    assert "--enable-sleep-mode" in str(caught.value.hint)


@pytest.mark.usefixtures("stand_ins")
def test_a_slow_start_tells_its_percent(launcher: ProcessLauncher, make_request: MakeRequest, wait_until: WaitUntil) -> None:
    engine, request = VllmEngine(), make_request(environment={"FAKE_VLLM": "slow"})
    start(launcher, engine, request)
    wait_until(lambda: engine.check_health(request.run_directory, "s3cret").percent == 50, "half of the weights is loaded")
    assert engine.check_health(request.run_directory, "s3cret").state is HealthState.LOADING


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("oom", "not enough GPU memory: it wanted 192.00 GiB more, 11.56 GiB of 15.98 GiB was free"),
        ("no-kv", "no memory is left for the KV cache after the weights"),
        ("two-at-once", "only 3.22 of 4.0 GiB of the GPU was free at its start, and it was set to take 3.6 GiB"),
        ("port-taken", "another program took its port first"),
    ],
)
def test_a_death_at_load_has_a_reason(
    launcher: ProcessLauncher, make_request: MakeRequest, wait_until: WaitUntil, word: str, reason: str
) -> None:
    engine, request = VllmEngine(), make_request(environment={"FAKE_VLLM": word})
    start(launcher, engine, request)
    wait_until(lambda: launcher.find_started() == {}, "vLLM gave up")
    assert engine.failure_reason(launcher.last_lines(request.run_directory)) == reason


@pytest.mark.usefixtures("stand_ins")
def test_a_flag_that_it_does_not_take_is_named(
    launcher: ProcessLauncher, make_request: MakeRequest, wait_until: WaitUntil
) -> None:
    engine, request = VllmEngine(), make_request(flags={"--no-such-flag": "1"})
    start(launcher, engine, request)
    wait_until(lambda: launcher.find_started() == {}, "vLLM gave up")
    reason = engine.failure_reason(launcher.last_lines(request.run_directory))
    assert reason == "it does not take these arguments: unrecognized arguments: --no-such-flag 1"


@pytest.mark.usefixtures("stand_ins")
def test_an_engine_that_hangs_is_not_ready_and_ends_with_its_core(
    launcher: ProcessLauncher, make_request: MakeRequest, wait_until: WaitUntil
) -> None:
    engine, request = VllmEngine(), make_request(environment={"FAKE_VLLM": "hang deaf"})
    command = engine.command(request)
    process = launcher.start("chat-0", command, request.run_directory)
    wait_until(lambda: any("startup complete" in line for line in launcher.last_lines(request.run_directory)), "it listens")
    assert engine.check_health(request.run_directory, "s3cret").state is not HealthState.READY
    launcher.stop(process, grace_seconds=0.2)
    assert launcher.find_started() == {}


def test_availability_is_read_without_starting_it(stand_ins: Path) -> None:
    assert VllmEngine().availability().version == "0.19.0"
    metadata = stand_ins.parent / "lib/python3.12/site-packages/vllm-0.32.0.dist-info"
    metadata.mkdir(parents=True)
    assert VllmEngine().availability().version == "0.32.0"
    missing = VllmEngine(program="no-such-vllm").availability()
    assert (missing.available, missing.hint) == (False, "pip install vllm, or use --launcher docker.")


@pytest.mark.parametrize(
    ("version", "in_image", "simulated", "sleeps"),
    [
        ("0.32.0", False, False, True),
        ("0.32.0+cpu", False, False, False),
        ("0.32.0+cpu", True, False, True),  # what is installed says nothing about the image
        ("0.32.0", True, True, False),  # the image for the CPU
    ],
)
def test_it_sleeps_where_it_is_not_the_build_for_the_cpu(
    stand_ins: Path, version: str, *, in_image: bool, simulated: bool, sleeps: bool
) -> None:
    (stand_ins.parent / f"lib/python3.12/site-packages/vllm-{version}.dist-info").mkdir(parents=True)
    reason = VllmEngine().why_no_sleep(in_image=in_image, simulated=simulated)
    assert reason == (None if sleeps else "vLLM has no sleep mode on the CPU")


# Lines that users posted; the source stands beside each.
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (  # vllm-project/vllm issue 27706
            (
                "(EngineCore_DP0 pid=1531) ERROR 10-29 01:56:59 [v1/engine/core.py:779] torch.OutOfMemoryError: HIP out of "
                "memory. Tried to allocate 256.00 GiB. GPU 0 has a total capacity of 15.98 GiB of which 8.07 GiB is free."
            ),
            "not enough GPU memory: it wanted 256.00 GiB more, 8.07 GiB of 15.98 GiB was free",
        ),
        (  # ovg-project/kvcached issue 29
            (
                "ValueError: Free memory on device (59.32/79.15 GiB) on startup is less than desired GPU memory utilization "
                "(0.9, 71.24 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
            ),
            "only 59.32 of 79.15 GiB of the GPU was free at its start, and it was set to take 71.24 GiB",
        ),
        (  # vllm-project/vllm-omni issue 946
            (
                "(EngineCore_DP0 pid=6804) ValueError: No available memory for the cache blocks. Try increasing "
                "`gpu_memory_utilization` when initializing the engine."
            ),
            "no memory is left for the KV cache after the weights",
        ),
        (  # a user's post mortem of two models on one card
            (
                "ValueError: To serve at least one request with the model's max seq len (32000), (1.1 GiB KV cache is needed, "
                "which is larger than the available KV cache memory (0.59 GiB)."
            ),
            "one request of 32000 tokens needs 1.1 GiB of KV cache, and it has 0.59 GiB",
        ),
        (  # vllm-project/vllm issue 16118
            (
                "ERROR 04-05 01:12:55 [core.py:390] ValueError: To serve at least one request with the models's max seq len "
                "(1048576), (24.00 GiB KV cache is needed, which is larger than the available KV cache memory (9.97 GiB). Try "
                "increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine."
            ),
            "one request of 1048576 tokens needs 24.00 GiB of KV cache, and it has 9.97 GiB",
        ),
        (  # vllm-project/vllm issue 2418, before V1
            (
                "ValueError: The model's max seq len (4096) is larger than the maximum number of tokens that can be stored in "
                "KV cache (3664). Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the "
                "engine."
            ),
            "one request of 4096 tokens does not fit into its KV cache of 3664 tokens",
        ),
        ("ERROR 05-07 02:14:18 [core.py:396] KeyError: 'layers.0.weight'", "KeyError: 'layers.0.weight'"),
        (  # vllm-project/vllm issue 21882: says nothing, so neither do we
            "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore_0': 1}",
            None,
        ),
    ],
)
def test_real_lines_give_a_reason(line: str, reason: str | None) -> None:
    assert read_failure((line,)) == reason


def test_real_lines_give_the_percent_loaded() -> None:
    lines = (
        "Loading safetensors checkpoint shards:   0% Completed | 0/4 [00:00<?, ?it/s]",
        "Loading safetensors checkpoint shards:  25% Completed | 1/4 [00:07<00:21,  7.16s/it]",
    )
    assert read_load_percent(lines) == 25
    assert read_load_percent(("INFO nothing yet",)) is None
