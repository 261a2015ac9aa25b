"""Random creations and deletions of pods with shares while operator, admission server and API server are killed at random."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.cluster.cluster import BUSYBOX_IMAGE, Cluster
from tests.cluster.waiting import wait_until

MEMORY_MIB = 2048
_ROOM = 40  # of 192 GiB, well below what fits: every pod is to run


@dataclass(slots=True)
class Chaos:
    """`kills`: what can be killed and started again, by name; each returns when it runs."""

    cluster: Cluster
    namespace: str
    kills: dict[str, Callable[[], None]]
    seed: int
    alive: list[str] = field(default_factory=list)
    killed: dict[str, int] = field(default_factory=dict)
    made: int = 0

    def run(self, steps: int) -> None:
        """Two creations to one deletion, and a kill in about every fifth step."""
        dice = random.Random(self.seed)
        for _ in range(steps):
            if dice.random() < 0.2:
                self._kill(dice.choice(sorted(self.kills)))
            if self.alive and (len(self.alive) >= _ROOM or dice.random() < 1 / 3):
                name = self.alive.pop(dice.randrange(len(self.alive)))
                self._try("delete", "pod", name, "--wait=false", "--grace-period=0", "--ignore-not-found")
            else:
                self.made += 1
                name = f"chaos-{self.made}"
                self._create(name)
                self.alive.append(name)

    def settle(self, grants: Callable[[], list[dict[str, Any]]]) -> None:
        """Until pods, claims, GpuShares and the node's ledger agree."""
        wanted = set(self.alive)

        def agree() -> bool:
            pods = {item["metadata"]["name"]: item for item in self.cluster.get_all("pods", self.namespace)}
            running = {name for name, item in pods.items() if item["status"].get("phase") == "Running"}
            claims = self.cluster.get_all("resourceclaims", self.namespace)
            shares = self.cluster.get_all("gpushares", self.namespace)
            allocated = [one for one in shares if _is_true(one)]
            return (
                set(pods) == running == wanted
                and len(claims) == len(wanted)
                and {one["spec"]["workload"]["name"] for one in shares} == wanted
                and len(allocated) == len(wanted)
                and sum(int(one["memory_bytes"]) for one in grants()) == len(wanted) * (MEMORY_MIB << 20)
            )

        wait_until(agree, "ledger, claims, shares and pods agree", lambda: None)

    def _kill(self, name: str) -> None:
        self.killed[name] = self.killed.get(name, 0) + 1
        self.kills[name]()

    def _create(self, name: str) -> None:
        main = {"name": "main", "image": BUSYBOX_IMAGE, "imagePullPolicy": "Never", "command": ["/bin/sleep", "100000"]}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "annotations": {"gpu-memory": str(MEMORY_MIB)}},
            "spec": {"terminationGracePeriodSeconds": 0, "containers": [main]},
        }
        self._until_done(lambda: self.cluster.apply(pod, self.namespace))

    def _try(self, *arguments: str) -> None:
        self._until_done(lambda: self.cluster.kubectl(*arguments, f"--namespace={self.namespace}"))

    def _until_done(self, act: Callable[[], object]) -> None:
        """As a controller does it: what was refused because something is down is tried again."""
        deadline = time.monotonic() + 300
        while True:
            try:
                act()
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
            else:
                return


def _is_true(share: dict[str, Any]) -> bool:
    conditions = share.get("status", {}).get("conditions") or [{}]
    return bool(conditions[0].get("status") == "True")
