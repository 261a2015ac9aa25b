"""The decisions as a whole, in virtual time: a generated workload that offers more than the GPU can do."""

from benchmarks.qos.engine import work_seconds
from benchmarks.qos.replay import BASELINES, BOUNDS, OURS, Replay
from benchmarks.qos.trace import Mix, generate_lengths, make_arrivals

from aimgpu.domain import Priority

SECONDS, SLOTS, MODELS = 400.0, 32, 4
LOAD = {Priority.HIGH: 0.04, Priority.MEDIUM: 0.1, Priority.LOW: 1.36}


def replay(name: str) -> Replay:
    [policy] = [policy for policy in (*BASELINES, OURS) if policy.name == name]
    mix = Mix(load=LOAD, models=MODELS, popularity=1.0, seconds=SECONDS, seed=5)
    arrivals = make_arrivals(generate_lengths(5), mix, lambda prompt, output: work_seconds(prompt, output, SLOTS))
    run = Replay(policy, MODELS, SLOTS)
    run.run(arrivals, SECONDS)
    return run


def attainment(run: Replay, priority: Priority) -> float:
    tally = run.tallies[priority]
    return tally.kept / tally.offered


def test_high_work_keeps_its_promise_where_first_come_first_served_breaks_it() -> None:
    ours, fifo = replay("aimgpu"), replay("fifo")
    assert attainment(ours, Priority.HIGH) >= 0.99
    assert attainment(fifo, Priority.HIGH) < 0.5
    assert ours.tallies[Priority.LOW].output_tokens >= 0.8 * fifo.tallies[Priority.LOW].output_tokens


def test_nobody_who_started_waited_longer_than_stated() -> None:
    ours = replay("aimgpu")
    for priority, tally in ours.tallies.items():
        assert max(tally.waits) <= BOUNDS[priority] + 0.5  # an iteration of the simulated GPU may end just after
    assert ours.tallies[Priority.LOW].refused > 0
