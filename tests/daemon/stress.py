"""Random operations by twelve threads, callers and kills against the real daemon; and what must agree when it has settled."""

import json
import os
import random
import signal
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.daemon.cheap_engines import GPUS
from tests.daemon.running import TestDaemon, apply

from aimgpu.cli.client import DaemonClient
from aimgpu.errors import AimGpuError, DaemonUnreachable
from aimgpu.ledger.read_only import read_instances
from aimgpu.units import GIB

THREADS = 12
CALLERS = 4
CALLER_SECONDS = 300.0
STEADY: dict[str, dict[str, Any]] = {  # never released: only killed, put to sleep and moved
    "steady0": {"priority": "high", "replicas": 2, "gpu": {"memory": "2GiB"}},
    "steady1": {"priority": "high", "keep": "10m", "gpu": {"memory": "2GiB"}},
    "steady2": {"priority": "high", "gpu": {"memory": "2GiB"}},
}
OTHERS = [f"other{number}" for number in range(8)]
LAYOUTS = ["SPX/NPS1", "DPX/NPS1", "QPX/NPS1", "CPX/NPS1"]
_HTTP_ANSWERED = 200
_ENGINE_DIED = 502


def make_stack(models: dict[str, dict[str, Any]]) -> str:
    return json.dumps({"models": {name: {"model": "any/50", **fields} for name, fields in models.items()}})


def random_model(chance: random.Random) -> dict[str, Any]:
    gib = chance.choice([1, 1, 5, 20, 90, 180])
    model = {"replicas": chance.choice([1, 1, 2]), "priority": chance.choice(["low", "medium"]), "gpu": {"memory": f"{gib}GiB"}}
    return model | ({"keep": "10m"} if chance.random() < 0.5 else {})


def some_models(chance: random.Random) -> dict[str, dict[str, Any]]:
    return {name: random_model(chance) for name in chance.sample(OTHERS, chance.randint(1, 3))}


Operation = Callable[[DaemonClient, random.Random], object]
OPERATIONS: dict[str, Operation] = {
    "attach": lambda client, chance: apply(client, make_stack(some_models(chance))),
    "apply": lambda client, chance: apply(client, make_stack(STEADY | some_models(chance))),
    "make room": lambda client, chance: list(client.apply(make_stack(some_models(chance)), "/", make_room=True)),
    "prune": lambda client, chance: list(client.apply(make_stack(STEADY | some_models(chance)), "/", prune=True)),
    "down": lambda client, chance: client.release([chance.choice(OTHERS)]),
    "resize": lambda client, chance: client.resize(chance.choice(OTHERS), chance.randint(1, 60) * GIB, dry_run=False),
    "partition": lambda client, chance: list(
        client.partition(str(chance.randrange(GPUS)), chance.choice(LAYOUTS), reload_driver=False)
    ),
    "sleep": lambda client, chance: client._json("POST", f"/models/{chance.choice([*OTHERS, *STEADY])}/sleep", {}),
    "wake": lambda client, chance: client._json("POST", f"/models/{chance.choice([*OTHERS, *STEADY])}/wake", {}),
    "look": lambda client, _: client.read_status(),
}


@dataclass(kw_only=True)
class Tally:
    """What was done and seen; `failures` are what must not be."""

    kills: int = 0
    operations: Counter[str] = field(default_factory=Counter)
    answers: Counter[int] = field(default_factory=Counter)
    answered: list[str] = field(default_factory=list)  # requests, by their word
    failures: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def describe(self) -> str:
        return f"{self.kills} kills, {sum(self.operations.values())} operations, answers by status {dict(self.answers)}"


class Stress:
    """One daemon under it. `seed` repeats the choices, not the moments at which they fall."""

    def __init__(self, daemon: TestDaemon, seed: int) -> None:
        self.daemon = daemon
        self.tally = Tally()
        self._seed = seed
        self._numbers = iter(range(10**9))

    def run_round(self, number: int, *, operations: int, kills: int, daemon_dies: bool) -> None:
        """So many operations per thread; callers ask all the while, unless the daemon itself is killed too."""
        client = self.daemon.wait_until_it_answers()
        seeds = [f"{self._seed}/{number}/{thread}" for thread in range(THREADS)]
        operators = [
            threading.Thread(target=self._operate, args=(client, random.Random(seed), operations, daemon_dies))
            for seed in seeds
        ]
        done = threading.Event()
        url = client.read_status()["models_url"] + "/chat/completions"
        callers = [threading.Thread(target=self._call, args=(url, done)) for _ in range(0 if daemon_dies else CALLERS)]
        killer = threading.Thread(target=self._kill, args=(random.Random(f"{self._seed}/{number}/kill"), kills, done))
        for thread in (*operators, *callers, killer):
            thread.start()
        if daemon_dies:
            done.wait(random.Random(f"{self._seed}/{number}").uniform(0.1, 1.0))
            self.daemon.kill()
        _join(operators, "an operation")
        done.set()
        _join([*callers, killer], "a caller")
        if daemon_dies:
            self.daemon.start()

    def _operate(self, client: DaemonClient, chance: random.Random, count: int, daemon_dies: bool) -> None:  # noqa: FBT001
        for _ in range(count):
            name = chance.choice(list(OPERATIONS))
            with self.tally.lock:
                self.tally.operations[name] += 1
            try:
                OPERATIONS[name](client, chance)
            except DaemonUnreachable as error:
                if not daemon_dies:
                    self._fail(f"{name}: {error.message}")
            except AimGpuError as error:
                if error.http_status >= 500 and error.http_status != 503:
                    self._fail(f"{name}: {error.code}: {error.message}")
            except Exception as error:  # noqa: BLE001 - looked at by the test
                self._fail(f"{name}: {error!r}")

    def _call(self, url: str, done: threading.Event) -> None:
        chance = random.Random(threading.get_ident())
        while not done.wait(0.01):
            word = f"request-{next(self._numbers)}"
            model = chance.choice(list(STEADY))
            status, text = ask(url, model, word)
            with self.tally.lock:
                self.tally.answers[status] += 1
            if status == _HTTP_ANSWERED:
                with self.tally.lock:
                    self.tally.answered.append(word)
                if f'"{word}"' not in text:
                    self._fail(f"{model} answered another's request: {text[:200]}")
            elif status != _ENGINE_DIED:
                self._fail(f"{model} answered {status}: {text[:300]}")

    def _kill(self, chance: random.Random, count: int, done: threading.Event) -> None:
        for _ in range(count):
            done.wait(chance.uniform(0.0, 0.4))
            running = list(self.daemon.launcher.find_started().values())
            if running:
                with suppress(ProcessLookupError):
                    os.kill(chance.choice(running).pid, signal.SIGKILL)
                    self.tally.kills += 1
            if over := over_granted(self.daemon):
                self._fail(f"after a kill: {over}")

    def _fail(self, text: str) -> None:
        with self.tally.lock:
            self.tally.failures.append(text)

    def check_requests(self, record: Path) -> None:
        """No request was begun by two engines, and each that was answered was begun by one."""
        begun = Counter(record.read_text().split()) if record.exists() else Counter[str]()
        twice = [word for word, times in begun.items() if times > 1]
        assert twice == [], "begun by two engines"
        assert set(self.tally.answered) <= set(begun)
        assert len(set(self.tally.answered)) == len(self.tally.answered)


def ask(url: str, model: str, word: str) -> tuple[int, str]:
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": word}]}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=CALLER_SECONDS + 30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, repr(error)


def over_granted(daemon: TestDaemon) -> str | None:
    """At any moment: whether a device is charged more than it has."""
    held: Counter[str] = Counter()
    for instance in read_instances(daemon.home.ledger_file):
        for grant in instance.grants:
            held[grant.device_id] += grant.memory_bytes
    over = {device: size for device, size in held.items() if size > 192 * GIB}
    return f"over-granted: {over}" if over else None


def find_difference(daemon: TestDaemon, client: DaemonClient) -> str | None:
    """Between what is shown, the ledger, the processes and the devices; None where all agree and nothing is under way."""
    shown = client.read_status()
    instances = read_instances(daemon.home.ledger_file)
    running = daemon.launcher.find_started()
    states = {one.id: one.state.value for one in instances}
    if {item["id"]: item["state"] for item in shown["instances"]} != states:
        return f"shown {shown['instances']}, in the ledger {states}"
    if set(states.values()) - {"ready", "sleeping", "failed"}:
        return f"under way: {states}"
    held = {one.id: one.process for one in instances if one.grants}
    if held != dict(running):
        return f"granted to {held}, running {running}"
    if shown["gpus"] and (wrong := _wrong_devices(shown, [grant for one in instances for grant in one.grants])):
        return wrong
    ready = Counter(one.deployment for one in instances if one.state.value in ("ready", "sleeping"))
    missing = {name: ready[name] for name, model in STEADY.items() if ready[name] != model.get("replicas", 1)}
    retries = [item for item in shown["instances"] if item["retry"] and not item["retry"]["gave_up"]]
    return f"replicas of {missing}, retries {retries}, waiting {shown['waiting']}" if missing else None


def _wrong_devices(shown: dict[str, Any], grants: list[Any]) -> str | None:
    by_partition: Counter[str] = Counter()
    for grant in grants:
        by_partition[grant.partition_id] += grant.memory_bytes
    parts = {part["id"]: part for gpu in shown["gpus"] for part in gpu["partitions"]}
    if unknown := by_partition.keys() - parts.keys():
        return f"granted on partitions that do not exist: {unknown}"
    for name, part in parts.items():
        if part["granted_bytes"] != by_partition[name] or by_partition[name] > part["memory_bytes"]:
            return f"{name}: {part}, in the ledger {by_partition[name]}"
    return None


def _join(threads: list[threading.Thread], what: str) -> None:
    for thread in threads:
        thread.join(CALLER_SECONDS + 60)
        assert not thread.is_alive(), f"{what} hangs"
