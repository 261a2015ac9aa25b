"""Advice is true: whoever follows a sentence of a Refusal gets a place."""

import re
from collections.abc import Iterator
from dataclasses import replace

from hypothesis import event, given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.placement.strategies import asks, snapshots
from tests.placement.worlds import grant_on, mi300x, state_of, world

from aimgpu.domain import Ask, Auto, IsolationRequirement, Memory, PartitionKind, Placement, Refusal, Whole
from aimgpu.placement import NodeState, Snapshot
from aimgpu.placement.decide import decide
from aimgpu.placement.layouts import relayout_of, with_relayout
from aimgpu.units import GIB, format_bytes, parse_bytes, parse_ppm


def followed(snapshot: Snapshot, ask: Ask, sentence: str) -> Iterator[tuple[Snapshot, Ask]]:
    """The worlds and Asks that the sentence may mean; Device ids repeat on other nodes, so there may be several."""
    if found := re.match(r"Stop (.+) on (\S+): ", sentence):
        yield from ((stopped(snapshot, node.name, found[2], set(found[1].split(", "))), ask) for node in snapshot.nodes)
    elif found := re.match(r"Stop (.+): then \d+ GPUs of (\S+) fit", sentence):
        yield stopped(snapshot, found[2], None, set(found[1].split(", "))), ask
    elif found := re.match(r"End the other processes on (\S+): ", sentence):
        yield from ((cleared(snapshot, node.name, found[1]), ask) for node in snapshot.nodes)
    elif found := re.match(r"Repartition (\S+) as (\S+?)(?: after stopping (.+?))?(?: \(reloads the driver\))?\.$", sentence):
        stop = set(found[3].split(", ")) if found[3] else set()
        for node in snapshot.nodes:
            yield from (
                (after, ask) for after in relaid(stopped(snapshot, node.name, None, stop), node.name, found[1], found[2])
            )
    elif found := re.match(r"Reduce it to (\S+) with ", sentence):
        yield snapshot, replace(ask, footprint_bytes=parse_bytes(found[1]))
    elif sentence.startswith("Split it over"):
        yield snapshot, divided_over(ask, sentence)
    else:
        yield from ((snapshot, weaker) for weaker in weakened(ask, sentence))


def weakened(ask: Ask, sentence: str) -> Iterator[Ask]:
    if found := re.match(r"Request at (?:most|least) ([^\s:,]+B)[,:]", sentence):
        yield replace(ask, want=Memory(memory_bytes=parse_bytes(found[1])))
    elif found := re.match(r"Request at most (\S+) of host memory", sentence):
        yield replace(ask, host_memory_bytes=parse_bytes(found[1]))
    elif found := re.match(r"Request at most (\d+)m of CPU", sentence):
        yield replace(ask, cpu_millis=int(found[1]))
    elif found := re.match(r"Request at most (\S+) of the GPU's compute", sentence):
        yield replace(ask, compute_ppm=parse_ppm(found[1]))
    elif found := re.match(r"Accept isolation: (\w+);", sentence):
        yield replace(ask, isolation=IsolationRequirement(found[1]))
    elif found := re.match(r"Request a (\S+) partition", sentence):
        yield replace(ask, want=PartitionKind(kind=found[1]))
    elif found := re.match(r"Request (\d+) GPUs? instead", sentence):
        fewer = int(found[1])
        count, needs = ask.want.count if isinstance(ask.want, Whole) else ask.devices, ask.footprint_bytes
        shared = replace(ask, footprint_bytes=None if needs is None else -(-needs * count // fewer))
        yield replace(shared, want=Whole(count=fewer)) if isinstance(ask.want, Whole) else replace(shared, devices=fewer)
    elif sentence.startswith("Accept a "):
        yield replace(ask, products=frozenset(), refused_products=frozenset(), vendor=None, refused_vendor=None)
    elif sentence.startswith("Let it run beside"):
        yield replace(ask, not_with_deployments=frozenset())
    elif sentence.startswith("Let it run without"):
        yield replace(ask, with_deployments=frozenset())
    elif sentence.startswith("Do not name a partition"):
        yield replace(ask, partition_id=None)


def divided_over(ask: Ask, sentence: str) -> Ask:
    found = re.match(r"Split it over (\d+) GPUs \(gpu: \{(.+)\}\)", sentence)
    assert found, sentence
    over = int(found[1])
    shared = replace(ask, footprint_bytes=dict(ask.divided)[over])
    if found[2] == f"whole: {over}":
        return replace(shared, want=Whole(count=over), devices=1)
    return replace(shared, want=Auto() if found[2] == f"devices: {over}" else ask.want, devices=over)


def stopped(snapshot: Snapshot, node_name: str, device_id: str | None, names: set[str]) -> Snapshot:
    def of(node: NodeState) -> NodeState:
        if node.name != node_name:
            return node
        devices = tuple(
            replace(state, grants=tuple(grant for grant in state.grants if grant.deployment not in names))
            if device_id in (None, state.device.id)
            else state
            for state in node.devices
        )
        return replace(node, devices=devices)

    return replace(snapshot, nodes=tuple(map(of, snapshot.nodes)))


def relaid(snapshot: Snapshot, node_name: str, device_id: str, layout_name: str) -> Iterator[Snapshot]:
    """The Snapshot in which the Device has that Layout, if it is there and may have it."""
    for node in snapshot.nodes:
        for state in node.devices if node.name == node_name else ():
            for layout in state.device.layouts if state.device.id == device_id else ():
                relayout = relayout_of(node, state.device, layout) if layout.name == layout_name else None
                if relayout is not None and not relayout.touched(node.devices):
                    yield with_relayout(snapshot, node_name, relayout)


def cleared(snapshot: Snapshot, node_name: str, device_id: str) -> Snapshot:
    def of(node: NodeState) -> NodeState:
        if node.name != node_name:
            return node
        devices = tuple(replace(state, foreign_bytes={}) if state.device.id == device_id else state for state in node.devices)
        return replace(node, devices=devices)

    return replace(snapshot, nodes=tuple(map(of, snapshot.nodes)))


@settings(max_examples=examples(80))
@given(snapshots(), asks(), st.dictionaries(st.sampled_from(("n0", "n1")), st.integers(1, 3)))
def test_whoever_follows_the_advice_gets_a_place(snapshot: Snapshot, ask: Ask, reserved: dict[str, int]) -> None:
    decision = decide(snapshot, ask, reserved=reserved)
    if isinstance(decision, Placement):
        return
    for sentence in decision.would_fit:
        event(re.sub(r"[\d~].*", "", sentence)[:24])
        tried = list(followed(snapshot, ask, sentence))
        if sentence.startswith("Add ") or " and add a" in sentence:
            continue
        assert tried, sentence
        assert any(isinstance(decide(*each, reserved=reserved), Placement) for each in tried), sentence


@settings(max_examples=examples(60))
@given(snapshots(), asks())
def test_nobody_is_told_to_stop_the_deployment_that_asks(snapshot: Snapshot, ask: Ask) -> None:
    decision = decide(snapshot, replace(ask, deployment="a"))
    if isinstance(decision, Refusal):
        for sentence in decision.would_fit:
            stops = re.match(r"Stop (.+?)(?: on |: then)", sentence) or re.search(r"after stopping (.+?)(?:\.| \()", sentence)
            assert stops is None or "a" not in stops[1].split(", "), sentence


def test_fewer_devices_are_advised_only_where_each_has_what_was_asked_for() -> None:
    device = mi300x("g0")
    full = world(state_of(device, grant_on(device, device.memory_bytes - 100, name="x")))
    for ask, told in (
        (Ask(name="m", want=Memory(memory_bytes=101), devices=2), False),
        (Ask(name="m", want=Memory(memory_bytes=100), devices=2), True),
        (Ask(name="m", want=Memory(memory_bytes=100), footprint_bytes=51, devices=2), False),
        (Ask(name="m", want=Memory(memory_bytes=100), footprint_bytes=50, devices=2), True),
    ):
        decision = decide(full, ask)
        assert isinstance(decision, Refusal)
        assert ("Request 1 GPU instead of 2: n0 has that many." in decision.would_fit) is told
        held = decide(full, ask, reserved={"n0": 2})
        assert isinstance(held, Refusal)
        assert not any("instead of 2" in sentence for sentence in held.would_fit)


def test_a_grant_of_no_bytes_leaves_one_less_to_ask_for() -> None:
    device = mi300x("g0")
    snapshot = world(state_of(device, grant_on(device, 0, name="x")))
    decision = decide(snapshot, Ask(name="m", want=Memory(memory_bytes=device.memory_bytes)))
    assert isinstance(decision, Refusal)
    left = device.memory_bytes - 1
    assert decision.would_fit[0].startswith(f"Request at most {format_bytes(left)}:")
    assert isinstance(decide(snapshot, Ask(name="m", want=Memory(memory_bytes=left))), Placement)


def test_needing_less_is_advised_only_where_that_alone_helps() -> None:
    device = mi300x("g0")
    snapshot = world(state_of(device, grant_on(device, 150 * GIB, name="x")))
    for asked, told in ((100 * GIB, False), (30 * GIB, True)):
        ask = Ask(name="m", want=Memory(memory_bytes=asked), footprint_bytes=60 * GIB, least_bytes=20 * GIB)
        decision = decide(snapshot, ask)
        assert isinstance(decision, Refusal)
        assert any(sentence.startswith("Reduce it to") for sentence in decision.would_fit) is told


def test_the_layout_that_is_advised_would_do() -> None:
    device = mi300x("g0")
    snapshot = world(state_of(device, grant_on(device, 10 * GIB, name="x")))
    decision = decide(snapshot, Ask(name="kind", want=PartitionKind(kind="cpx")))
    assert isinstance(decision, Refusal)
    assert decision.would_fit[0] == "Repartition g0 as CPX/NPS1 after stopping x."
    laid = world(state_of(mi300x("g0", "cpx")))
    assert isinstance(decide(laid, Ask(name="kind", want=PartitionKind(kind="cpx"))), Placement)


def test_a_model_is_never_told_to_take_less_than_it_can_run_in() -> None:
    device = mi300x("g0")
    snapshot = world(state_of(device, grant_on(device, 150 * GIB, name="x")))
    for least, told in ((None, False), (50 * GIB, False), (20 * GIB, True)):
        decision = decide(snapshot, Ask(name="m", want=Auto(), footprint_bytes=60 * GIB, least_bytes=least))
        assert isinstance(decision, Refusal)
        assert any(sentence.startswith("Reduce it to") for sentence in decision.would_fit) is told
        assert not any(sentence.startswith("Request at most") for sentence in decision.would_fit)
