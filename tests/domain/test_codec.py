from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aimgpu.domain import (
    Ask,
    Auto,
    Deployment,
    Fraction,
    Grant,
    Instance,
    InstanceState,
    IsolationRequirement,
    Level,
    Memory,
    PartitionKind,
    Priority,
    ProcessIdentity,
    ServiceObjective,
    Spread,
    Whole,
)
from aimgpu.domain.codec import decode, encode
from aimgpu.errors import InvalidInput

sizes = st.integers(min_value=1, max_value=2**50)
names = st.text(min_size=1, max_size=20)
wants = st.one_of(
    st.just(Auto()),
    sizes.map(lambda n: Memory(memory_bytes=n)),
    st.integers(1, 10**6).map(lambda n: Fraction(ppm=n)),
    names.map(lambda k: PartitionKind(kind=k)),
    st.integers(1, 8).map(lambda n: Whole(count=n)),
)
asks = st.builds(
    Ask,
    name=names,
    want=wants,
    footprint_bytes=st.none() | sizes,
    compute_ppm=st.none() | st.integers(1, 10**6),
    isolation=st.sampled_from(IsolationRequirement),
    priority=st.sampled_from(Priority),
    products=st.frozensets(names, max_size=3),
    spread=st.sampled_from(Spread),
    pinned=st.booleans(),
)
deployments = st.builds(
    Deployment,
    name=names,
    model=names,
    ask=asks,
    engine=st.none() | names,
    objective=st.none()
    | st.builds(
        ServiceObjective,
        ttft_p95_ms=st.none() | sizes,
        tokens_per_second=st.none() | sizes,
        low=st.none() | st.builds(ServiceObjective, latency_p99_ms=st.none() | sizes),
    ),
    keep_seconds=st.none() | sizes,
)
grants = st.builds(
    Grant,
    id=names,
    instance_id=names,
    deployment=names,
    node=names,
    device_id=names,
    partition_id=names,
    memory_bytes=sizes,
    compute_ppm=st.none() | sizes,
    priority=st.sampled_from(Priority),
    level=st.sampled_from(Level),
    exclusive=st.booleans(),
)
instances = st.builds(
    Instance,
    id=names,
    deployment=names,
    replica=st.integers(0, 9),
    model=names,
    engine=names,
    launcher=names,
    state=st.sampled_from(InstanceState),
    reason=st.none() | names,
    last_lines=st.lists(names, max_size=3).map(tuple),
    process=st.none() | st.builds(ProcessIdentity, pid=sizes, start_ticks=sizes, boot_id=names),
    grants=st.lists(grants, max_size=2).map(tuple),
)


@given(deployments)
def test_a_deployment_reads_back_as_it_was_written(deployment: Deployment) -> None:
    assert decode(Deployment, encode(deployment), "it") == deployment


@given(instances)
def test_an_instance_reads_back_as_it_was_written(instance: Instance) -> None:
    assert decode(Instance, encode(instance), "it") == instance


def test_a_field_that_an_older_version_did_not_know_takes_its_default() -> None:
    written = encode(Ask(name="a", want=Auto()))
    del written["pinned"]
    assert decode(Ask, written, "it") == Ask(name="a", want=Auto())


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {},
        {"id": "a"},
        {"name": 1, "want": {"auto": {}}},
        "x",
        {"name": "a", "want": {"nope": {}}},
        {"name": "a", "want": {"auto": {}}, "typo": 1},
    ],
)
def test_what_was_not_written_by_us_is_refused_with_its_place(data: object) -> None:
    with pytest.raises(InvalidInput, match="it"):
        decode(Ask, data, "it")


@given(deployments)
def test_fields_left_out_because_they_have_their_default_are_read_as_that(deployment: Deployment) -> None:
    short = encode(deployment, defaults=False)
    assert decode(Deployment, short, "it") == deployment
    assert "replicas" not in encode(replace(deployment, replicas=1), defaults=False)


def test_fields_that_are_missing_take_their_defaults() -> None:
    written = {"ttft_p95_ms": 500, "tpot_p95_ms": None, "latency_p95_ms": 2000, "availability_ppm": 990_000}
    found = decode(ServiceObjective, written, "objective")
    assert found == ServiceObjective(ttft_p95_ms=500, latency_p95_ms=2000, availability_ppm=990_000)
