"""The daemon: controller, gateway, control API and page on one port. `python -m aimgpu.daemon.assembly --home ...`."""

import argparse
import asyncio
import contextlib
import functools
import importlib.metadata
import logging
import os
import re
import resource
import secrets
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from aimgpu import wiring
from aimgpu.control.controller import Controller
from aimgpu.control.dependencies import Dependencies
from aimgpu.control.stack.stack_file import GpuChoice
from aimgpu.daemon.activator import Activator, InstanceUsage
from aimgpu.daemon.api import ApiDependencies, create_api
from aimgpu.daemon.controller_routes import ControllerRoutes, EngineOwners, RouteSources
from aimgpu.daemon.engine_replacement import replace_faulty
from aimgpu.daemon.event_loop import call_in_loop
from aimgpu.daemon.metrics import make_exporter, make_observer
from aimgpu.daemon.mps_reaper import end_unused_mps, keep_mps
from aimgpu.daemon.page import PageDependencies, make_page
from aimgpu.daemon.programs import ProgramLine, watch_programs
from aimgpu.daemon.queue_settings import QueueSettingsStore
from aimgpu.daemon.reloading_keys import ReloadingKeys
from aimgpu.daemon.router import Admission, Router
from aimgpu.daemon.sharing import SharingLoop
from aimgpu.daemon.status import Addresses, StatusSources
from aimgpu.daemon.supervisor import bound_own_log, log_event, put_idle_to_sleep, reconcile, supervise
from aimgpu.daemon.watchdog import WatchSources, watch
from aimgpu.errors import AimGpuError, DaemonRunning, InvalidInput, NotAllowed, from_os_error
from aimgpu.files import write_private
from aimgpu.gateway.application import Gateway, GatewayDependencies, GatewaySettings, create_gateway
from aimgpu.gateway.cors import parse_origins
from aimgpu.gateway.grammar_cost import GrammarPolicy
from aimgpu.gateway.heartbeat import parse_wake_heartbeat
from aimgpu.gateway.hosts import is_loopback, parse_hosts
from aimgpu.gateway.http.asgi import Application
from aimgpu.gateway.http.server import caller_config
from aimgpu.gateway.http.tls import CallerServer, ServerCertificate, TlsListener
from aimgpu.gateway.http.upstream import PooledUpstream
from aimgpu.gateway.liveness import LoopWatch, ProbeServer
from aimgpu.gateway.media import parse_media_domains
from aimgpu.gateway.routes import RouteTable
from aimgpu.hardware.nvidia.mps import MpsDaemons
from aimgpu.hardware.protocols import Hardware
from aimgpu.home import DaemonRecord, Home
from aimgpu.isolation.interposer import Interposer, regions_directory
from aimgpu.isolation.request_signals import RegionRequestSignals
from aimgpu.isolation.throttle import GateThrottle
from aimgpu.isolation.yielding import GateYield
from aimgpu.ledger import Ledger, Owner
from aimgpu.logs import START_FAILED, configure_logging
from aimgpu.monitoring.traces import make_traces
from aimgpu.procfs import read_boot_id, read_start_ticks
from aimgpu.qos.queueing.policy import policy_for
from aimgpu.qos.slo.activity import ActivityLog, parse_kept_prompts
from aimgpu.qos.slo.arbiter import Arbiter
from aimgpu.secret_variables import take_secrets
from aimgpu.web.authority import Authority
from aimgpu.web.routes import PageApplication

log = logging.getLogger(__name__)


_OPEN_FILES = 65_536
_LAST_PORT = 65_535
_FIRST_PORT = 8080  # that is proposed
_PORTS_TRIED = 64
_SWITCH_SECONDS = 0.0005


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    home: Home
    host: str
    port: int
    gpus: GpuChoice
    tls_cert: Path | None = None
    tls_key: Path | None = None  # in the file of the certificate where None


MakeDependencies = Callable[[Home, Hardware, Callable[[str], int]], Dependencies]


def run_daemon(options: ServeOptions, make_dependencies: MakeDependencies = wiring.make_dependencies) -> int:
    """Returns when asked to stop. Its models keep running after a signal, and are adopted by the next start."""
    allow_open_files()
    # Many threads start and watch engines; the one that answers callers must not wait long for its turn.
    sys.setswitchinterval(_SWITCH_SECONDS)
    options.home.create()
    owner = Owner.acquire(options.home.path)
    try:
        keys = _read_keys(options)
        listeners = _listen(options)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # uvicorn's own choice needs its own runner
            runner.run(_Daemon(options, listeners, keys, owner).run(make_dependencies))
    finally:
        owner.release()
    return 0


def allow_open_files(most: int = _OPEN_FILES) -> None:
    """A shell's usual limit of 1,024 is less than the callers that may wait here and the files that a poll keeps open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # it then serves as many as it may
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class DaemonServer(CallerServer):
    """Calls `before_shutdown` once no one can connect any more, before it waits for the answers under way."""

    before_shutdown: Callable[[], Awaitable[None]]
    let_go = False

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's."""
        for server in self.servers:
            server.close()
        for one in sockets or []:
            one.close()
        self.let_go = True
        await self.before_shutdown()
        await super().shutdown(sockets)


@dataclass(frozen=True, slots=True)
class _Listeners:
    """With TLS the plain one is for this machine's own commands and browsers, on a loopback port that is free."""

    plain: socket.socket
    tls: TlsListener | None = None


@dataclass(frozen=True, slots=True)
class _Running:
    """What runs beside the gateway, and ends before it."""

    controller: Controller
    dependencies: Dependencies
    activator: Activator
    routes: ControllerRoutes
    page: PageApplication
    mps: MpsDaemons
    interposer: Interposer
    gateway: Gateway


class _Daemon:
    def __init__(self, options: ServeOptions, listeners: _Listeners, keys: ReloadingKeys, owner: Owner) -> None:
        self._options = options
        self._owner = owner
        self._listeners = listeners
        self._keys = keys
        self._port = listeners.plain.getsockname()[1]
        port = self._port if listeners.tls is None else listeners.tls.socket.getsockname()[1]
        host = f"[{options.host}]" if ":" in options.host else options.host
        shown = "127.0.0.1" if options.host in ("0.0.0.0", "::") else host  # noqa: S104 - compared, not bound
        tls_url = None if listeners.tls is None else f"https://{shown}:{port}"
        url = f"http://{shown}:{port}" if tls_url is None else f"http://127.0.0.1:{self._port}"
        self._addresses = Addresses(version=_version(), pid=os.getpid(), url=url, tls_url=tls_url)
        self._gateway: Gateway | None = None
        self._reconciled = asyncio.Event()

    async def run(self, make_dependencies: MakeDependencies) -> None:
        """Until it is asked to stop; probes are answered meanwhile, also while it starts."""
        watch = LoopWatch()
        probes = _start_probes(self._options.host, watch, self._reconciled.is_set)
        turning = asyncio.create_task(watch.run())
        try:
            await self._run(make_dependencies)
        finally:
            turning.cancel()
            if probes is not None:
                probes.close()

    async def _run(self, make_dependencies: MakeDependencies) -> None:
        hardware = _open_hardware(self._options)
        dependencies = make_dependencies(self._options.home, hardware, self._requests_in_flight)
        controller, ledger = Controller(dependencies), dependencies.ledger
        interposer = wiring.make_interposer(self._options.home)
        mps = wiring.make_mps(self._options.home)
        throttle = GateThrottle(ledger.grants, interposer.regions)
        activity = ActivityLog(time.time, prompts=_read_kept_prompts())
        table, owners, arbiter = RouteTable(), EngineOwners(), Arbiter()
        self._gateway = gateway = create_gateway(
            table, settings=_read_settings(ledger), dependencies=self._make_served(activity, throttle, owners, arbiter)
        )
        monitor = gateway.slo_monitor
        activator = self._make_activator(controller, dependencies, gateway)
        signals = RegionRequestSignals(regions_directory(self._options.home.path))
        routes = ControllerRoutes(
            _route_sources(controller, dependencies, owners), table, activator.find_arrival, activity.add_signals(signals.find)
        )
        observer = make_observer(controller, dependencies, interposer.read_tenants)
        exporter = make_exporter(controller, dependencies, observer, (monitor.counts, self._addresses.version))
        for background_reader in (routes, activator, self._keys):
            background_reader.start()
        reconciled = self._reconciled
        self._sharing = _make_sharing(controller, gateway, interposer, arbiter)
        self._line = ProgramLine(controller, dependencies.runs)
        token = _make_token(self._options.home)
        authority = Authority(token, self._keys.table)
        page = make_page(
            PageDependencies(
                controller=controller,
                dependencies=dependencies,
                observer=observer,
                activator=activator,
                activity=activity,
                addresses=self._addresses,
                read_scores=partial(monitor.report, windows=1, every_class=False),
                authority=authority,
            ),
            self._make_api(
                StatusSources.of(controller, dependencies, activator.waiting_for_room, activator.explain), ledger, routes, token
            ),
        )
        access = Admission(keys=self._keys.table, authority=authority, hosts=_read_hosts())
        gateway.fallback = Router(page, exporter, access, self._read_for_metrics, reconciled.is_set)
        self._server = server = DaemonServer(caller_config(gateway), self._listeners.tls)
        parts = _Running(controller, dependencies, activator, routes, page, mps, interposer, gateway)
        background = self._start_tasks(parts, reconciled)
        background.append(asyncio.create_task(self._announce(server)))
        server.before_shutdown = lambda: self._let_go(parts, background)
        try:
            await server.serve(sockets=[self._listeners.plain])
        finally:
            if not server.let_go:
                await self._let_go(parts, background)
            await gateway.close()

    def _make_served(
        self, activity: ActivityLog, throttle: GateThrottle, owners: EngineOwners, arbiter: Arbiter
    ) -> GatewayDependencies:
        return GatewayDependencies(
            keys=self._keys.table,
            upstream=PooledUpstream(check=owners.check),
            fetcher=wiring.make_model_store(),
            observer=make_traces(activity) or activity,
            arbiter=arbiter,
            on_pressure=lambda device, pressure: _in_background(throttle.apply, device, pressure.low_share),
        )

    def _make_activator(self, controller: Controller, dependencies: Dependencies, gateway: Gateway) -> Activator:
        loop, least_seconds = asyncio.get_running_loop(), dependencies.timing.least_residency_seconds
        return Activator(
            controller,
            gateway.slots.wake_requests,
            lambda: call_in_loop(loop, gateway.slo_monitor.read_activity),
            log_event,
            usage=InstanceUsage(in_flight=self._requests_in_flight, least_residency_seconds=least_seconds),
        )

    def _start_tasks(self, parts: "_Running", reconciled: asyncio.Event) -> list["asyncio.Task[None]"]:
        controller, ledger, slots = parts.controller, parts.dependencies.ledger, parts.gateway.slots
        watched = WatchSources(
            interposer=parts.interposer,
            hardware=parts.dependencies.hardware,
            ledger=ledger,
            helpers=parts.dependencies.helpers,
        )
        return [
            asyncio.create_task(reconcile(controller, ledger.set_aside, reconciled)),
            asyncio.create_task(supervise(controller, reconciled)),
            asyncio.create_task(watch_programs(controller, self._line, reconciled)),
            asyncio.create_task(bound_own_log(self._options.home.log_file)),
            asyncio.create_task(put_idle_to_sleep(parts.activator.tick, reconciled)),
            asyncio.create_task(watch(controller, watched, reconciled)),
            asyncio.create_task(keep_mps(controller, parts.mps, reconciled)),
            asyncio.create_task(self._sharing.run()),
            asyncio.create_task(
                replace_faulty(slots.engine_faults, functools.partial(_replace_engine, controller), reconciled)
            ),
        ]

    async def _let_go(self, parts: "_Running", background: list["asyncio.Task[None]"]) -> None:
        """Everything but the answers under way: another daemon may take the models over while these end."""
        await parts.page.close()
        for task in background:
            task.cancel()
            await asyncio.wait([task])  # raises nothing that the task did
        parts.controller.leave()  # a wake that hangs would hold up the activator
        await asyncio.to_thread(parts.activator.close)
        await asyncio.to_thread(parts.routes.stop)
        await asyncio.to_thread(self._keys.stop)
        await asyncio.to_thread(end_unused_mps, parts.controller, parts.mps)
        await asyncio.to_thread(parts.controller.close)
        self._options.home.remove_daemon(os.getpid())
        self._owner.release()

    def _make_api(self, status: StatusSources, ledger: Ledger, routes: ControllerRoutes, token: str) -> Application:
        gateway = self._gateway
        if gateway is None:
            raise RuntimeError("the gateway comes first")
        return create_api(
            ApiDependencies(
                status=status,
                token=token,
                addresses=self._addresses,
                reconciled=self._reconciled,
                expect=routes.expect,
                check_gpus=lambda stack: wiring.check_gpus(stack, status.hardware),
                stop=self._stop,
                read_sharing=self._sharing.report,
                read_scores=gateway.slo_monitor.report,
                describe_queue=gateway.slo_monitor.describe_queue,
                queue=QueueSettingsStore(ledger, gateway),
                line=self._line,
            )
        )

    def _read_for_metrics(self) -> Mapping[str, Any]:
        """What a scrape shows of the gateway and of the gates."""
        scores = self._gateway.slo_monitor.report(windows=0, every_class=False) if self._gateway else {}
        return {**scores, "sharing": self._sharing.report()}

    def _requests_in_flight(self, instance_id: str) -> int:
        return self._gateway.slots.in_flight(instance_id) if self._gateway else 0

    def _stop(self) -> None:
        self._server.should_exit = True

    async def _announce(self, server: uvicorn.Server) -> None:
        """Commands find the daemon by this record, so it is written once the daemon answers."""
        while not server.started:  # noqa: ASYNC110 - uvicorn offers a flag and no event
            await asyncio.sleep(0.01)
        # In place of uvicorn's own handlers, which raise the signal again at the end and so skip everything after `serve`.
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._stop)
        record = DaemonRecord(
            pid=os.getpid(),
            start_ticks=read_start_ticks(os.getpid()) or 0,
            boot_id=read_boot_id(),
            host=self._options.host if self._listeners.tls is None else "127.0.0.1",
            port=self._port,
            url=self._addresses.url,
        )
        self._options.home.write_daemon(record)
        log.info("daemon.listening", extra={"data": {"url": self._addresses.url, "pid": os.getpid()}})


def _replace_engine(controller: Controller, instance_id: str) -> None:
    controller.stop_instance(instance_id, restart=True, emit=log_event)


def _route_sources(controller: Controller, dependencies: Dependencies, owners: EngineOwners) -> RouteSources:
    return RouteSources(
        controller=controller,
        engines=dependencies.engines,
        models=dependencies.models,
        runs=dependencies.runs,
        owners=owners,
    )


def _read_settings(ledger: Ledger) -> GatewaySettings:
    return GatewaySettings(
        queue=policy_for(ledger.queue()),
        hosts=_read_hosts(),
        origins=parse_origins(os.environ.get("AIMGPU_CORS_ORIGINS", "")),
        separate_caches=os.environ.get("AIMGPU_SEPARATE_CACHES") != "0",
        wake_heartbeat_seconds=parse_wake_heartbeat(os.environ.get("AIMGPU_WAKE_HEARTBEAT") or "5s"),
        media_domains=parse_media_domains(os.environ.get("AIMGPU_MEDIA_DOMAINS", "")),
        grammars=_read_grammar_policy(os.environ.get("AIMGPU_RAW_GRAMMARS", "")),
        keep_prompts=_read_kept_prompts() > 0,
    )


def _read_hosts() -> frozenset[str]:
    return parse_hosts(os.environ.get("AIMGPU_HOSTS", ""))


def _read_grammar_policy(text: str) -> GrammarPolicy:
    try:
        return GrammarPolicy(text or GrammarPolicy.CHECKED)
    except ValueError:
        known = ", ".join(GrammarPolicy)
        raise InvalidInput(f"AIMGPU_RAW_GRAMMARS is '{text[:50]}'.", hint=f"Set it to one of: {known}.") from None


def _read_kept_prompts() -> int:
    return parse_kept_prompts(os.environ.get("AIMGPU_KEEP_PROMPTS") or "0")


def _open_hardware(options: ServeOptions) -> Hardware:
    hardware = wiring.choose_hardware(options.gpus, options.home)
    for finding in hardware.inspect():
        log.warning("gpu.finding", extra={"data": {"code": finding.code, "text": finding.text, "hint": finding.hint}})
    return hardware


def _make_sharing(controller: Controller, gateway: Gateway, interposer: Interposer, arbiter: Arbiter) -> SharingLoop:
    """The loop that steers the launch gate by what the gateway measures."""
    steer = GateYield(interposer.regions)
    return SharingLoop(
        deployments=controller.deployments,
        instances=controller.instances,
        pace=gateway.pace,
        steer=steer,
        arbiter=arbiter,
    )


def _in_background(work: Callable[..., object], *arguments: object) -> None:
    """For a listener on the event loop: locks and files are touched in a thread."""
    asyncio.get_running_loop().run_in_executor(None, work, *arguments)


def _listen(options: ServeOptions) -> _Listeners:
    if options.tls_cert is None:
        return _Listeners(_bind(options.host, options.port))
    certificate = ServerCertificate(options.tls_cert, options.tls_key or options.tls_cert)
    return _Listeners(_bind("127.0.0.1", 0), TlsListener(_bind(options.host, options.port), certificate))


def _start_probes(host: str, watch: LoopWatch, is_ready: Callable[[], bool]) -> ProbeServer | None:
    text = os.environ.get("AIMGPU_PROBE_PORT", "")
    if not text:
        return None
    if re.fullmatch("[0-9]{1,5}", text) is None or int(text) > _LAST_PORT:
        raise InvalidInput(f"AIMGPU_PROBE_PORT is '{text[:50]}'.", hint="Set it to the number of a free port.")
    try:
        return ProbeServer(watch, is_ready, (host, int(text)))
    except OSError as error:
        hint = "Another program has the port? Set AIMGPU_PROBE_PORT to a free one."
        raise DaemonRunning(f"cannot answer probes on {host}:{text}: {error.strerror}", hint=hint) from error


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        why = "Ports below 1024 are for root" if isinstance(error, PermissionError) else "Another program has the port?"
        hint = f"{why}. Choose one with `--port {_free_port(family, host, port)}`, or set AIMGPU_PORT.".replace("?.", "?")
        raise DaemonRunning(f"cannot listen on {host}:{port}: {error.strerror}", hint=hint) from error
    return listener


def _free_port(family: socket.AddressFamily, host: str, taken: int) -> int:
    """The next that nobody has, from that of every daemon on."""
    for port in (*range(max(taken + 1, _FIRST_PORT), _LAST_PORT + 1)[:_PORTS_TRIED], 0):
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            try:
                trial.bind((host, port))
            except OSError:
                continue
            return int(trial.getsockname()[1])
    return taken


def _read_keys(options: ServeOptions) -> ReloadingKeys:
    """Without keys only this machine may call; from the first key on, keys are required."""
    keys = ReloadingKeys(options.home.keys_file, required=not is_loopback(options.host))
    if not is_loopback(options.host) and not len(keys.table):
        raise NotAllowed(
            f"listening on {options.host} lets other machines in, and there is no API key",
            hint="Make one with `aimgpu keys add NAME`, or listen on 127.0.0.1.",
        )
    return keys


def _make_token(home: Home) -> str:
    """A new token for each daemon: an old one that leaked is worth nothing."""
    token = secrets.token_urlsafe(32)
    write_private(home.token_file, token)
    return token


def _version() -> str:
    return importlib.metadata.version("aimgpu")


def parse_options(arguments: list[str]) -> ServeOptions:
    parser = argparse.ArgumentParser(prog="aimgpu.daemon.assembly", description="The daemon behind `aimgpu up`.")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--tls-cert", type=Path, help="serve TLS with this certificate")
    parser.add_argument("--tls-key", type=Path, help="its key (default: in the same file)")
    parser.add_argument("--simulate", metavar="PRODUCT")
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--software", action="store_true", help="simulate by the software GPU's driver")
    parser.add_argument(
        "--secrets-on-stdin", action="store_true", help="read environment variables as JSON before anything else"
    )
    given = parser.parse_args(arguments)
    gpus = GpuChoice(simulated=given.simulate, count=given.count, software=given.software)
    return ServeOptions(
        home=Home(given.home), host=given.host, port=given.port, gpus=gpus, tls_cert=given.tls_cert, tls_key=given.tls_key
    )


def main(make_dependencies: MakeDependencies = wiring.make_dependencies) -> int:
    configure_logging()
    if "--secrets-on-stdin" in sys.argv:
        take_secrets(sys.stdin.buffer, os.environ)
    try:
        return run_daemon(parse_options(sys.argv[1:]), make_dependencies)
    except AimGpuError as error:
        return _report(error)
    except OSError as error:
        log.exception("daemon.failed")
        return _report(from_os_error(error))


def _report(error: AimGpuError) -> int:
    """For people on a terminal in words; for the command that started us as a record of the log."""
    if sys.stderr.isatty():
        sys.stderr.write(f"error: {error.message}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
    else:
        with contextlib.suppress(OSError):  # the disk of the log may be full: the exit status remains
            log.error(START_FAILED, extra={"data": {"error": error.to_json()}})
    return error.exit_status


if __name__ == "__main__":
    sys.exit(main())
