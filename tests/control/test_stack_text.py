from hypothesis import given
from hypothesis import strategies as st

from aimgpu.control.stack.overrides import unmask
from aimgpu.control.stack.stack_file import parse_stack
from aimgpu.control.stack.stack_text import write_stack
from aimgpu.domain import (
    Ask,
    Auto,
    Deployment,
    EngineOverrides,
    Fraction,
    IsolationRequirement,
    Memory,
    PartitionKind,
    Priority,
    SecretKind,
    SecretSource,
    ServiceObjective,
    Spread,
    WatchdogPolicy,
    Whole,
)

_counts = st.integers(1, 64)
_wants = st.one_of(
    st.just(Auto()),
    st.builds(Memory, memory_bytes=st.integers(1, 2**40)),
    st.builds(Fraction, ppm=st.integers(1, 1_000_000)),
    st.just(PartitionKind(kind="cpx")),
    st.builds(Whole, count=_counts),
)
_plain = st.builds(
    ServiceObjective,
    ttft_p95_ms=st.integers(1, 600_000),
    tokens_per_second=st.none() | st.integers(1, 10_000),
    availability_ppm=st.none() | st.integers(1, 1_000_000),
)
_objectives = st.one_of(st.none(), _plain, st.builds(ServiceObjective, latency_p99_ms=st.integers(1, 10**6), low=_plain))


OVERRIDES = EngineOverrides(
    arguments=(("enable-prefix-caching",), ("seed", "7"), ("stop", "a", "b")),
    environment=(("VLLM_LOGGING_LEVEL", "DEBUG"),),
    secrets=(
        SecretSource(name="HF_TOKEN", kind=SecretKind.FILE, source="/run/token"),
        SecretSource(name="OTHER", kind=SecretKind.VARIABLE, source="MINE"),
    ),
    image="vllm/vllm-openai:v0.26.0",
)


@st.composite
def deployments(draw: st.DrawFn) -> Deployment:
    name = draw(st.from_regex(r"\A[a-z0-9][a-z0-9._-]{0,20}\Z"))
    want = draw(_wants)
    ask = Ask(
        name=name,
        deployment=name,
        want=want,
        devices=1 if isinstance(want, Whole) else draw(_counts),
        compute_ppm=draw(st.none() | st.integers(1, 1_000_000)),
        isolation=draw(st.sampled_from(IsolationRequirement)),
        priority=draw(st.sampled_from(Priority)),
        spread=draw(st.sampled_from(Spread)),
        with_deployments=draw(st.sampled_from([frozenset[str](), frozenset({"embed"})])),
        cpu_millis=draw(st.integers(0, 8000)),
        host_memory_bytes=draw(st.integers(0, 2**36)),
        pinned=draw(st.booleans()),
    )
    return Deployment(
        name=name,
        model=draw(st.sampled_from(["Qwen/Qwen2.5-7B-Instruct", "/models/a b.gguf", "llama3:8b", "yes", "1e3"])),
        ask=ask,
        engine=draw(st.sampled_from([None, "vllm", "llamacpp"])),
        precision=draw(st.sampled_from([None, "fp16"])),
        context_tokens=draw(st.none() | st.integers(1, 100_000)),
        concurrency=draw(st.none() | _counts),
        objective=draw(_objectives),
        aliases=draw(st.sampled_from([(), (f"also/{name}", f"{name}:8b")])),
        replicas=draw(_counts),
        keep_seconds=draw(st.none() | st.integers(1, 10**6)),
        sleeps_in_place=draw(st.booleans()),
        launcher=draw(st.sampled_from(["process", "docker"])),
        prepared=draw(st.booleans()),
        watchdog=draw(st.sampled_from(WatchdogPolicy)),
        overrides=draw(st.sampled_from([EngineOverrides(), OVERRIDES])),
    )


@given(deployments())
def test_a_stack_that_was_written_reads_back_as_the_same_deployment(deployment: Deployment) -> None:
    (found,) = unmask(parse_stack(write_stack([deployment])).deployments, [deployment])
    assert found == deployment
