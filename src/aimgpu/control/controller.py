"""Deploy, release, reconcile, partition: the one owner of what runs on this machine."""

import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace

from aimgpu.control.dependencies import Dependencies
from aimgpu.control.events import Emit, Event, EventKind, ignore
from aimgpu.control.lifecycle.lifecycle import Lifecycle
from aimgpu.control.planning.new_instance import make_instance
from aimgpu.control.planning.plan import (
    Plan,
    Prepared,
    Step,
    StepKind,
    fits_without,
    make_plan,
    needs_work,
    release_step,
    without_instances,
)
from aimgpu.control.planning.preparation import prepare
from aimgpu.control.planning.resize_carryover import carry_over
from aimgpu.control.reconcile import Repair, RepairKind, decide_repairs
from aimgpu.control.retry_queue import RetryQueue, Turn, Waiting, from_first_state
from aimgpu.control.runs.run_files import read_run_record
from aimgpu.control.runs.wait_ready import wait_until_ready
from aimgpu.control.sleep.eviction_policy import Resident, choose_evictions
from aimgpu.control.sleep.grants import awake_grants
from aimgpu.control.snapshots import take_snapshot
from aimgpu.control.statistics import Statistics
from aimgpu.domain import Deployment, Device, Instance, InstanceState
from aimgpu.engines.launchers.log import LOG_NAME
from aimgpu.engines.launchers.log_bound import bound_log
from aimgpu.errors import AimGpuError, Conflict, UnknownDeployment
from aimgpu.placement import Snapshot

_HOUR_SECONDS = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyResult:
    """What an apply came to."""

    plan: Plan
    instances: tuple[Instance, ...] = ()

    @property
    def failed(self) -> tuple[Instance, ...]:
        return tuple(instance for instance in self.instances if instance.state is InstanceState.FAILED)


class Controller:
    """Thread-safe. Planning and charging happen one at a time; starting and waiting side by side."""

    def __init__(self, parts: Dependencies) -> None:
        self.parts = parts
        self.changed = threading.Condition()
        self.mutation = threading.RLock()  # held while planning and charging, not while starting
        self.statistics = Statistics()
        self._waiting = RetryQueue()
        self._preemptions: deque[float] = deque(maxlen=1000)
        self._lifecycle = Lifecycle(parts, self.changed)
        self._starts = ThreadPoolExecutor(max_workers=32, thread_name_prefix="start")
        # Apart from `_starts`, whose workers these wait for: one pool for both could wait for itself.
        self._redeploys = ThreadPoolExecutor(max_workers=4, thread_name_prefix="redeploy")
        self._ending = threading.Event()  # set under `_mutation`: after it nothing is charged

    # --- reading ---

    def snapshot(self) -> Snapshot:
        return take_snapshot(self.parts, recent_preemptions=self.preemptions_since(time.monotonic() - _HOUR_SECONDS))

    def devices(self) -> tuple[Device, ...]:
        return self.parts.hardware.read_devices()

    def instances(self) -> tuple[Instance, ...]:
        return self.parts.ledger.instances()

    def deployments(self) -> tuple[Deployment, ...]:
        return self.parts.ledger.deployments()

    def waiting(self) -> tuple[Waiting, ...]:
        """Deployments that are wanted and could not be started again."""
        return self._waiting.read({deployment.name for deployment in self.deployments()})

    # --- deploying ---

    def apply(
        self,
        deployments: Sequence[Deployment],
        *,
        emit: Emit = ignore,
        dry_run: bool = False,
        again: bool = False,
        prune: bool = False,
    ) -> ApplyResult:
        """Make these run. Taken whole or not at all; applying twice changes nothing. `prune`: and nothing else.

        `again`: they are wanted already; one that was released while it was prepared stays so, and raises Conflict.
        """
        self._check_names(deployments)
        deployments = carry_over(deployments, self.deployments(), self.instances())
        with self._prepared(deployments, emit, dry_run=dry_run) as ready:
            for deployment in deployments if again else ():
                self._check_wanted(deployment)
            plan = self._plan(ready, deployments, prune=prune)
            emit(Event(kind=EventKind.PLAN, text=f"{len(plan.steps)} steps", data=plan.to_json()))
            if plan.refusals or dry_run:
                if not dry_run:
                    self.count("apply", plan, ())
                return ApplyResult(plan=plan, instances=self._of(deployments))
            pruned = self.beside(deployments) if prune else ()
            charged = self._want_and_begin(deployments, plan, emit, pruned)
        self.count("apply", plan, self.start(charged, emit))
        if not again:
            timeout_seconds = self.parts.timing.load_timeout_seconds
            wait_until_ready(lambda: self._of(deployments), self.changed, emit, timeout_seconds=timeout_seconds)
        return ApplyResult(plan=plan, instances=self._of(deployments))

    def release(self, names: Iterable[str], *, emit: Emit = ignore) -> None:
        """Drain and stop these deployments; what was charged is given back by the same records."""
        wanted = {deployment.name for deployment in self.deployments()}
        names = list(dict.fromkeys(names))
        unknown = [name for name in names if name not in wanted]
        if unknown:
            hint = f"Running: {', '.join(sorted(wanted)) or 'nothing'}."
            raise UnknownDeployment(f"no deployment {', '.join(unknown)}", hint=hint)
        with self.mutation:
            self.parts.ledger.unwant(*names)
            ids = [instance.id for instance in self.instances() if instance.deployment in names]
        self._release_all(ids, emit)
        self.statistics.count("release", "ok")

    def release_everything(self, *, emit: Emit = ignore) -> None:
        self.release([deployment.name for deployment in self.deployments()], emit=emit)

    def end(self, *, emit: Emit = ignore) -> None:
        """Release everything for good: what is being prepared meanwhile is refused, and a download for it breaks off."""
        with self.mutation:
            self._ending.set()
        self.release_everything(emit=emit)

    def note_preemption(self, now: float) -> None:
        """Preemptions are bounded per hour, so they are remembered."""
        self._preemptions.append(now)
        self.statistics.count("preempt", "ok")

    def preemptions_since(self, moment: float) -> int:
        return sum(when >= moment for when in self._preemptions)

    # --- sleeping ---

    def sleep(self, name: str, *, emit: Emit = ignore) -> bool:
        """Unload a deployment and free its memory; a request will wake it. False where it was busy."""
        ready = [i for i in self.instances() if i.deployment == name and i.state is InstanceState.READY]
        slept = [self._lifecycle.sleep(instance, emit) for instance in ready]
        done = bool(slept) and all(slept)
        self.statistics.count("sleep", "ok" if done else "busy")
        return done

    def wake(self, name: str, residents: Sequence[Resident] = (), *, emit: Emit = ignore) -> ApplyResult:
        """Load a sleeping deployment again; where it does not fit, the cheapest of `residents` are unloaded for it.

        Never one of higher priority.
        """
        deployment = next((item for item in self.deployments() if item.name == name), None)
        if deployment is None:
            raise UnknownDeployment(f"no deployment {name}")
        item = prepare(self.parts, deployment, self._while_open(emit), may_fetch=True)
        with self.mutation:
            self.check_open()
            self._check_wanted(deployment)
            plan = self._wake_plan(item)
            if plan.refusals:
                for other in self._choose_evictions(item, residents):
                    text = f"unloading {other} to make room for {name}"
                    emit(Event(kind=EventKind.STEP, deployment=other, text=text))
                    self.sleep(other, emit=emit)
                plan = self._wake_plan(item)
            if plan.refusals:
                self.count("wake", plan, ())
                return ApplyResult(plan=plan, instances=self._of([deployment]))
            charged = self.begin(plan, emit)
        self.count("wake", plan, self.start(charged, emit))
        return ApplyResult(plan=plan, instances=self._of([deployment]))

    # --- repairing ---

    def reconcile(self, *, emit: Emit = ignore, wait: bool = True) -> tuple[Repair, ...]:
        """Make the books equal the truth after whatever happened: adopt, restart, release, stop."""
        with self.mutation:
            alive = {
                name: process for launcher in self.parts.launchers.values() for name, process in launcher.find_started().items()
            }
            if self.parts.ledger.set_aside is not None:
                self._rebuild(alive)
            partitions = {part.id for device in self.devices() for part in device.layout.partitions}
            wanted = {deployment.name for deployment in self.deployments()}
            repairs = decide_repairs(self.instances(), wanted, alive, partitions)
            going = [(repair, self._starts.submit(self._repair, repair, emit)) for repair in repairs]
            # What must end, ends before anything is placed again; what was adopted may take its time to be ready.
            for repair, done in going:
                if wait or repair.kind is not RepairKind.ADOPT:
                    done.result()
                else:
                    done.add_done_callback(lambda done: self._redeploy_lost(done, emit))
        restarts = {repair.instance.deployment for repair in repairs if repair.kind is RepairKind.RESTART and repair.instance}
        restarts |= {name for _, done in going if wait and (name := done.result()) is not None}
        restarts |= wanted - {instance.deployment for instance in self.instances()}
        self.redeploy(restarts, emit=emit, wait=wait)
        for operation in self.parts.ledger.operations():
            # What it had stopped is wanted and was restarted above, on the layout that was read; nothing is left of it.
            self.parts.ledger.finish(operation.id)
        return repairs

    def redeploy(self, names: Iterable[str], *, emit: Emit = ignore, wait: bool = True) -> None:
        """Start again what is wanted and gone, each on its own: one that no longer fits must not hold up the others."""
        chosen = set(names)
        going = [deployment for deployment in self.deployments() if deployment.name in chosen]
        going.sort(key=lambda deployment: -deployment.ask.priority.rank)
        turns = [Turn(deployment.ask.priority.rank) for deployment in going]
        waits = [
            self._redeploys.submit(self._apply_in_turn, deployment, turn, [one for one in turns if one.rank > turn.rank], emit)
            for deployment, turn in zip(going, turns, strict=True)
        ]
        for done in waits if wait else ():
            done.result()

    def retry_waiting(self, *, emit: Emit = ignore, wait: bool = True) -> None:
        """Try those again whose time has come, the most urgent first."""
        now = time.monotonic()
        due = [item for item in self.waiting() if item.retry_at <= now]
        for item in due:  # once at a time: preparing one may take long
            self._waiting.enter(item.deployment, item.reason, retry_at=math.inf)
        self.redeploy([item.deployment for item in due], emit=emit, wait=wait)

    def holding(self, instance: Instance) -> AbstractContextManager[None]:
        """Nothing else is done to it meanwhile; one that is being started, put to sleep or stopped raises Conflict."""
        return self._lifecycle.holding(instance)

    def suspend(self, instance_ids: Iterable[str], *, emit: Emit = ignore) -> None:
        """Stop these instances and free what they hold; their deployments stay wanted. What sleeps in place sleeps on."""
        with self.mutation:
            ids = list(instance_ids)
            asleep = {instance.id for instance in self.instances() if instance.sleeps_in_place} & set(ids)
            self._unload_all(sorted(asleep), emit)
            self._release_all((name for name in ids if name not in asleep), emit)

    def supervise(self, *, emit: Emit = ignore) -> tuple[str, ...]:
        """Look whether instances still run, sleepers too, and keep their logs short; returns the deployments that lost one."""
        everyone = self.instances()
        for instance in everyone:
            bound_log(self.parts.runs / instance.id / LOG_NAME)
        looked = [one for one in everyone if one.state is InstanceState.READY or one.sleeps_in_place]
        lost = [instance.deployment for instance in looked if not self._lifecycle.check_alive(instance, emit)]
        return tuple(dict.fromkeys(lost))

    def close(self) -> None:
        """What runs runs on; what is being started is left to the next one."""
        self._lifecycle.leave()
        self._redeploys.shutdown(wait=True)
        self._starts.shutdown(wait=True)
        self.parts.ledger.close()

    # --- inside ---

    def check_open(self) -> None:
        if self._ending.is_set():
            raise Conflict("the daemon is stopping", hint="Start it again with `aimgpu up`.")

    def _while_open(self, emit: Emit) -> Emit:
        """Ends a preparation at its next sign of progress once we are ending."""

        def tell(event: Event) -> None:
            self.check_open()
            emit(event)

        return tell

    def _check_names(self, deployments: Sequence[Deployment]) -> None:
        names = [deployment.name for deployment in deployments]
        if len(set(names)) != len(names):
            raise Conflict("two deployments have the same name", hint="Give each model its own name.")

    @contextmanager
    def _prepared(self, deployments: Sequence[Deployment], emit: Emit, *, dry_run: bool) -> Iterator[list[Prepared]]:
        """What needs work, prepared, and the right to act on it.

        Preparing takes its time and holds nobody up; what was changed or released meanwhile is prepared too.
        """
        tell = self._while_open(emit)
        ready: dict[str, Prepared] = {}
        while True:
            for item in self.changed_of(deployments):
                if item.name not in ready:
                    ready[item.name] = prepare(self.parts, item, tell, may_fetch=not dry_run)
            with self.mutation:
                self.check_open()
                if all(item.name in ready for item in self.changed_of(deployments)):
                    yield list(ready.values())
                    return

    def _check_wanted(self, deployment: Deployment) -> None:
        if deployment not in self.deployments():
            raise Conflict(f"{deployment.name} was released or changed meanwhile")

    def changed_of(self, deployments: Sequence[Deployment]) -> list[Deployment]:
        wanted = {deployment.name: deployment for deployment in self.deployments()}
        running = self.instances()
        return [item for item in deployments if needs_work(item, wanted, [i for i in running if i.deployment == item.name])]

    def beside(self, deployments: Sequence[Deployment]) -> tuple[str, ...]:
        """Names that are wanted and not among these."""
        names = {item.name for item in deployments}
        return tuple(item.name for item in self.deployments() if item.name not in names)

    def _plan(self, ready: Sequence[Prepared], deployments: Sequence[Deployment], *, prune: bool) -> Plan:
        others = self.beside(deployments)
        wanted = {item.name: item for item in self.deployments() if not (prune and item.name in others)}
        going = [one for one in self.instances() if prune and one.deployment in others]
        staying = [one for one in self.instances() if one not in going]
        plan = make_plan(ready, wanted, staying, without_instances(self.snapshot(), [one.id for one in going]))
        busy = {item.deployment.name for item in ready}
        return replace(
            plan,
            steps=() if plan.refusals else (*(release_step(one) for one in going), *plan.steps),
            unchanged=tuple(item.name for item in deployments if item.name not in busy),
            beside=() if prune else others,
        )

    def _choose_evictions(self, item: Prepared, residents: Sequence[Resident]) -> Sequence[str]:
        least = self.parts.timing.least_residency_seconds
        wanted = {deployment.name: deployment for deployment in self.deployments()}
        fits = fits_without(item, wanted, self.instances(), self.snapshot())
        rank = item.deployment.ask.priority.rank
        others = [r for r in residents if r.name != item.deployment.name and r.priority.rank <= rank]
        return choose_evictions(others, fits, least) or ()

    def _wake_plan(self, item: Prepared) -> Plan:
        wanted = {deployment.name: deployment for deployment in self.deployments()}
        return make_plan([item], wanted, self.instances(), self.snapshot(), waking=True)

    def _want_and_begin(
        self, deployments: Sequence[Deployment], plan: Plan, emit: Emit, pruned: Sequence[str]
    ) -> list[tuple[Instance, Prepared]]:
        """What could not be charged is not wanted either: the next start must not bring up what was refused to the user."""
        before = {deployment.name for deployment in self.deployments()}
        self.parts.ledger.unwant(*pruned)
        self.parts.ledger.want(*carry_over(deployments, self.deployments(), self.instances()))
        for deployment in deployments:
            self._waiting.leave(deployment.name)
        try:
            return self.begin(plan, emit)
        except AimGpuError:
            self.parts.ledger.unwant(*(item.name for item in deployments if item.name not in before))
            raise

    def begin(self, plan: Plan, emit: Emit) -> list[tuple[Instance, Prepared]]:
        """Release, unload and charge as planned; returns what is to be started or woken."""
        steps = {kind: [step for step in plan.steps if step.kind is kind] for kind in StepKind}
        self._release_all((step.instance_id for step in steps[StepKind.RELEASE]), emit)
        self._unload_all((step.instance_id for step in steps[StepKind.UNLOAD]), emit)
        self.parts.ledger.charge(*(self._instance_of(step, None) for step in steps[StepKind.SLEEP]), capacity={})
        return [*self._charge_again(steps[StepKind.WAKE]), *self._charge(steps[StepKind.DEPLOY])]

    def start(self, charged: Sequence[tuple[Instance, Prepared]], emit: Emit) -> tuple[Instance, ...]:
        """Also wakes: one that sleeps in place has a process already."""
        ways = [self._lifecycle.start if instance.process is None else self._lifecycle.wake for instance, _ in charged]
        going = [self._starts.submit(way, *pair, emit) for way, pair in zip(ways, charged, strict=True)]
        return tuple(done.result() for done in going)

    def count(self, operation: str, plan: Plan, started: Sequence[Instance]) -> None:
        failed = any(instance.state is InstanceState.FAILED for instance in started)
        self.statistics.count(operation, "refused" if plan.refusals else "failed" if failed else "ok")
        self.statistics.count_refusals(plan.refusals)

    def _of(self, deployments: Sequence[Deployment]) -> tuple[Instance, ...]:
        names = {deployment.name for deployment in deployments}
        return tuple(instance for instance in self.instances() if instance.deployment in names)

    def _capacity(self) -> dict[str, int]:
        return {part.id: part.memory_bytes for device in self.devices() for part in device.layout.partitions}

    def _charge(self, steps: Sequence[Step]) -> list[tuple[Instance, Prepared]]:
        charged = [(self._instance_of(step, self.snapshot()), step.prepared) for step in steps]
        self.parts.ledger.charge(*(instance for instance, _ in charged), capacity=self._capacity())
        return [(instance, prepared) for instance, prepared in charged if prepared is not None]

    def _charge_again(self, steps: Sequence[Step]) -> list[tuple[Instance, Prepared]]:
        """What sleeps in place holds everything again before it is woken."""
        woken = []
        known = {instance.id: instance for instance in self.instances()}
        for step in steps:
            instance = known.get(step.instance_id or "")
            if instance is None or step.prepared is None:
                raise Conflict(f"{step.deployment}: what was to be woken is gone", hint="Ask again.")
            awake = replace(instance, state=InstanceState.LOADING, grants=awake_grants(instance), reason=None)
            self.parts.ledger.rebook(awake, capacity=self._capacity())
            woken.append((awake, step.prepared))
        return woken

    def _instance_of(self, step: Step, snapshot: Snapshot | None) -> Instance:
        if step.prepared is None:
            raise Conflict(f"{step.deployment}: a step that was not prepared")
        grouped = self.parts.launchers[step.prepared.deployment.launcher].joins_groups
        return make_instance(step, step.prepared, snapshot, self.parts.engines[step.prepared.engine], grouped=grouped)

    def _unload_all(self, instance_ids: Iterable[str | None], emit: Emit) -> None:
        known = {instance.id: instance for instance in self.instances()}
        going = [known[name] for name in instance_ids if name in known]
        for done in [self._starts.submit(self._lifecycle.unload, instance, emit) for instance in going]:
            done.result()

    def _release_all(self, instance_ids: Iterable[str | None], emit: Emit) -> None:
        known = {instance.id: instance for instance in self.instances()}
        going = [known[name] for name in instance_ids if name in known]
        for instance in going:  # all at once: those that load may hold every worker that could release one
            self._lifecycle.cancel(instance)
        for done in [self._starts.submit(self._lifecycle.release, instance, emit) for instance in going]:
            done.result()

    def _repair(self, repair: Repair, emit: Emit) -> str | None:
        """The deployment that lost an instance: it ran when we looked, and could not be taken over."""
        match repair:
            case Repair(kind=RepairKind.STOP, process=process) if process is not None:
                for launcher in self.parts.launchers.values():
                    launcher.stop(process, grace_seconds=self.parts.timing.grace_seconds)
            case Repair(kind=RepairKind.ADOPT, instance=instance, process=process) if instance and process:
                adopted = self._lifecycle.adopt(instance, process, emit)
                return instance.deployment if adopted.state is InstanceState.FAILED else None
            case Repair(kind=RepairKind.UNLOAD, instance=instance) if instance:
                self._lifecycle.unload(instance, emit)
            case Repair(kind=RepairKind.RELEASE | RepairKind.RESTART, instance=instance) if instance:
                self._lifecycle.release(instance, emit, drain=False)
        return None

    def _redeploy_lost(self, done: Future[str | None], emit: Emit) -> None:
        name = None if done.cancelled() or done.exception() is not None else done.result()
        if name is not None and not self._ending.is_set():
            with suppress(RuntimeError):  # we are closing: the next start sees to it
                self.redeploy([name], emit=emit, wait=False)

    def _apply_in_turn(self, deployment: Deployment, turn: Turn, earlier: Sequence[Turn], emit: Emit) -> None:
        """Placed once the more urgent ones are, unless one of them takes long to prepare."""
        for one in earlier:
            one.wait()
        with turn:
            self._apply_quietly(deployment, turn.ending_with_plan(emit))

    def _apply_quietly(self, deployment: Deployment, emit: Emit) -> None:
        """A restart that fails is shown, not raised: nobody asked just now. It waits, and is tried again."""
        timing = self.parts.timing
        try:
            waits = any(item.deployment == deployment.name for item in self.waiting())
            outcome = self.apply([deployment], emit=from_first_state(emit) if waits else emit, again=True)
        except Conflict as error:  # released or changed meanwhile, or we are ending
            self._waiting.leave(deployment.name)
            emit(Event(kind=EventKind.ERROR, deployment=deployment.name, text=error.message, data=error.to_json()))
        except AimGpuError as error:
            if self._wait(deployment, error.message, timing.error_retry_seconds):
                emit(Event(kind=EventKind.ERROR, deployment=deployment.name, text=error.message, data=error.to_json()))
        except Exception as error:
            self._wait(deployment, f"a fault of ours: {error!r}", timing.error_retry_seconds)
            raise
        else:
            summary = "; ".join(refusal.summary for refusal in outcome.plan.refusals)
            if not summary:
                self._waiting.leave(deployment.name)
            elif self._wait(deployment, summary, timing.room_retry_seconds):
                emit(Event(kind=EventKind.REFUSED, deployment=deployment.name, text=summary))

    def _wait(self, deployment: Deployment, reason: str, seconds: float) -> bool:
        news = self._waiting.enter(deployment.name, reason, time.monotonic() + seconds)
        with self.changed:
            self.changed.notify_all()
        return news

    def _rebuild(self, alive: Iterable[str]) -> None:
        """The ledger was corrupt: take what runs as what is wanted and granted."""
        capacity = self._capacity()
        known = {instance.id for instance in self.instances()}
        for name in sorted(set(alive) - known):
            record = read_run_record(self.parts.runs, name)
            if record is None:
                continue
            try:
                asleep = record.instance.state is InstanceState.SLEEPING
                state = InstanceState.SLEEPING if asleep else InstanceState.LOADING
                self.parts.ledger.charge(replace(record.instance, state=state), capacity=capacity)
                self.parts.ledger.want(record.deployment)
            except Conflict:
                continue  # its partition is gone: reconcile stops it as one that the books do not know
