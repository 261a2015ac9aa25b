"""Serves three models of llama.cpp from one real GPU behind the gateway, each held to its Grant. Changes no setting of it.

    PYTHONPATH=src:. python tests/live/llamacpp_live.py OUT_FOLDER TOKENIZER.gguf

Needs an NVIDIA GPU, a C compiler and a `llama-server` built for the GPU (on PATH or in AIMGPU_LLAMA_SERVER); otherwise it says
what is missing. The models have random weights; TOKENIZER.gguf gives their tokenizer. Writes OUT_FOLDER/llamacpp_live.json,
what was seen and what did not hold, and the engines' logs; fails if anything did not hold.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.random_gguf import SHAPES, write_random_model

from aimgpu.engines.llamacpp.program import Program, find_program
from aimgpu.hardware.nvidia import NvidiaHardware
from aimgpu.isolation.interposer import Interposer, regions_directory
from aimgpu.units import GIB, MIB

failures: list[str] = []
PORT = 8377
URL = f"http://127.0.0.1:{PORT}"
# Two with what was sized for them to the byte, one with more; the last has too little and must fail with that reason.
MODELS: dict[str, dict[str, Any]] = {
    "chat": {"shape": "1b", "context": 4096, "concurrency": 4, "gpu": "auto", "priority": "high"},
    "small": {"shape": "135m", "context": 2048, "concurrency": 8, "gpu": "auto", "priority": "medium"},
    "batch": {"shape": "3b", "context": 8192, "concurrency": 2, "gpu": "{memory: 12GiB}", "priority": "low", "compute": "50%"},
}
TIGHT = {"shape": "1b", "context": 4096, "concurrency": 4, "gpu": "{memory: 2560MiB}", "priority": "medium"}
_USED = sorted({model["shape"] for model in (*MODELS.values(), TIGHT)})
_VRAM = re.compile(r"(?:VRAM: (\d+) MiB|- CUDA0\s*: .* \((\d+) MiB, (\d+) MiB free\))")
_LAYERS = re.compile(r"offloaded (\d+)/(\d+) layers to GPU")


class Machine:
    """One daemon with a home of its own, spoken to by the command line as a user does."""

    def __init__(self, folder: Path, models: Mapping[str, Path]) -> None:
        self.home, self.models = folder / "home", models
        self.hardware = NvidiaHardware()
        self.stack = folder / "stack.yaml"
        self.environment = {**os.environ, "AIMGPU_HOME": str(self.home)}

    def run(self, *arguments: str, check: bool = True) -> str:
        code = "import sys; from aimgpu.cli.main import main; sys.exit(main())"
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if check and done.returncode != 0:
            raise RuntimeError(f"aimgpu {' '.join(arguments)}: {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return done.stdout

    def say(self, *arguments: str) -> str:
        """Also what goes to people only, whether it succeeds or not."""
        code = "import sys; from aimgpu.cli.main import main; sys.exit(main())"
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        return done.stdout

    def ask(self, *arguments: str) -> dict[str, Any]:
        return dict(json.loads(self.run(*arguments, "--json")))

    def write_stack(self, wanted: Mapping[str, Mapping[str, Any]]) -> None:
        lines = ["gpus: auto", "models:"]
        for name, model in wanted.items():
            lines += [
                f"  {name}:",
                f"    model: {self.models[model['shape']]}",
                "    engine: llamacpp",
                "    isolation: enforced",
            ]
            lines += [f"    {key}: {value}" for key, value in model.items() if key != "shape"]
        self.stack.write_text("\n".join(lines) + "\n")

    def engines(self) -> dict[str, int]:
        """Instance -> pid, of processes that carry this home's mark."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                marks = dict(item.split("=", 1) for item in (entry / "environ").read_text().split("\0") if "=" in item)
            except (OSError, ValueError):
                continue
            if entry.name.isdigit() and marks.get("AIMGPU_HOME") == str(self.home) and "AIMGPU_INSTANCE" in marks:
                found[marks["AIMGPU_INSTANCE"]] = int(entry.name)
        return found

    def measured(self) -> dict[int, int]:
        """Pid -> bytes, by the driver."""
        return {one.pid: one.memory_bytes or 0 for usage in self.hardware.read_usage() for one in usage.processes}

    def counted(self) -> dict[str, int]:
        """Instance -> bytes, by the interposer."""
        regions = Interposer(regions_directory(self.home)).regions()
        return {use.name: use.used_bytes for region in regions for use in region.read_use()}

    def log(self, instance: str) -> str:
        return (self.home / "runs" / instance / "engine.log").read_text(errors="replace")


def main() -> int:
    out, tokenizer, program = Path(sys.argv[1]), Path(sys.argv[2]), find_program()
    if not isinstance(program, Program) or not NvidiaHardware().read_devices():
        sys.stdout.write(f"skipped: {getattr(program, 'reason', 'there is no NVIDIA GPU')}\n")
        return 0
    seen: dict[str, Any] = {"program": program.path, "build": program.build}
    with tempfile.TemporaryDirectory(prefix="aimgpu-live", dir="/dev/shm") as name:
        folder = Path(name)
        models = {shape: write_random_model(tokenizer, folder / f"{shape}.gguf", SHAPES[shape]) for shape in _USED}
        machine = Machine(folder, models)
        attempts: dict[str, Callable[[Machine], Any]] = {
            "doctor": try_doctor,
            "up": try_up,
            "memory": try_memory,
            "answers": try_answers,
            "restart": try_restart,
            "too_little": try_too_little,
            "down": try_down,
        }
        for step, attempt in attempts.items():
            began = time.monotonic()
            try:
                seen[step] = attempt(machine)
            except Exception:  # noqa: BLE001 - time on the machine is short: note it and try the rest
                failures.append(f"{step}: {traceback.format_exc()}")
            sys.stdout.write(f"{step}: {time.monotonic() - began:.1f} s\n")
            keep_logs(machine, out)
    text = json.dumps({**seen, "failures": failures}, indent=1, default=str)
    (out / "llamacpp_live.json").write_text(text)
    sys.stdout.write(text + "\n")
    return 1 if failures else 0


def expect(condition: bool, sentence: str) -> None:  # noqa: FBT001 - as assert, but the rest is still tried
    if not condition:
        failures.append(sentence)


def try_doctor(machine: Machine) -> Any:
    findings = json.loads(machine.run("doctor", "--port", str(PORT), "--json", check=False))["findings"]
    engine = [finding["text"] for finding in findings if finding["text"].startswith("llamacpp")]
    expect(any("llama-server" in text and "CPU" not in text for text in engine), f"doctor says {engine}")
    return engine


def try_up(machine: Machine) -> Any:
    machine.write_stack(MODELS)
    began = time.monotonic()
    machine.run("up", "-f", str(machine.stack), "--port", str(PORT), "--detach")
    status = machine.ask("ps")
    rows = {
        item["name"]: {key: item[key] for key in ("state", "level", "mechanism", "memory_bytes")}
        for item in status["instances"]
    }
    expect(set(rows) == set(MODELS) and all(row["state"] == "ready" for row in rows.values()), f"not all are ready: {rows}")
    expect(all(row["level"] == "runtime" for row in rows.values()), f"not all are enforced: {rows}")
    expect(not status["notes"], f"notes: {status['notes']}")
    return {"seconds": round(time.monotonic() - began, 1), "instances": rows, "table": machine.run("ps")}


def try_memory(machine: Machine) -> Any:
    """By the driver each engine holds no more than its Grant; by its own log it saw no more, and has every layer there."""
    granted = {item["id"]: item["memory_bytes"] for item in machine.ask("ps")["instances"]}
    measured, found = machine.measured(), dict[str, Any]()
    for instance, pid in sorted(machine.engines().items()):
        name = instance.rsplit("-", 2)[0]
        model = MODELS[name]
        log = machine.log(instance)
        shown = [max(int(number) for number in match if number) for match in _VRAM.findall(log)]
        layers = _LAYERS.findall(log)
        sized = machine.ask(
            *("size", str(machine.models[model["shape"]]), "--engine", "llamacpp", "--engine-version", f"b{find_build()}"),
            *("--context", str(model["context"]), "--concurrency", str(model["concurrency"])),
        )
        held = measured.get(pid, 0)
        expect(held > 0, f"{name}: the driver lists no memory of pid {pid}")
        expect(held <= granted[instance], f"{name} holds {held}, {granted[instance]} were granted")
        expect(
            bool(shown) and max(shown) * MIB <= granted[instance], f"{name} was shown {shown} MiB, granted {granted[instance]}"
        )
        expect(bool(layers) and all(one == other for one, other in layers), f"{name}: layers on the GPU {layers}")
        found[name] = {
            "granted": granted[instance],
            "measured": held,
            "sized": sized.get("total_bytes") or sized.get("memory_bytes"),
            "terms": {term["name"]: term["memory_bytes"] for term in sized.get("terms", ())},
            "counted": machine.counted().get(instance),
            "shown_mib": shown,
            "layers": layers[-1:],
            "buffers": [line.strip()[-90:] for line in log.splitlines() if "buffer size" in line],
        }
    found["gpus"] = machine.run("gpus")
    return found


def find_build() -> int:
    program = find_program()
    return program.build if isinstance(program, Program) else 0


def try_answers(machine: Machine) -> Any:
    """One after the other, then all at once; memory stays within the Grants while they compute."""
    found: dict[str, Any] = {name: generate(name, 128) for name in MODELS}
    found |= {f"{name}, a long prompt": generate(name, 16, words=600) for name in MODELS}
    threads = [threading.Thread(target=generate, args=(name, 256)) for name in MODELS for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    granted = {item["id"]: item["memory_bytes"] for item in machine.ask("ps")["instances"]}
    measured = machine.measured()
    for instance, pid in machine.engines().items():
        held = measured.get(pid, 0)
        expect(held <= granted[instance], f"{instance} holds {held} after use, {granted[instance]} were granted")
        counted = machine.counted().get(instance)
        found[f"{instance} after use"] = {"granted": granted[instance], "measured": held, "counted": counted}
    return found


def generate(name: str, tokens: int, *, words: int = 80) -> dict[str, Any]:
    body = {
        "model": name,
        "messages": [{"role": "user", "content": f"{time.monotonic_ns()} " + "word " * words}],
        "max_tokens": tokens,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        f"{URL}/v1/chat/completions", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    began = time.monotonic()
    with urllib.request.urlopen(request, timeout=120) as response:
        answer = json.loads(response.read())
    usage = answer["usage"]
    expect(usage["completion_tokens"] == tokens, f"{name} gave {usage}")
    timings = answer.get("timings") or {}
    return {
        "seconds": round(time.monotonic() - began, 3),
        "usage": usage,
        "tokens_per_second": timings.get("predicted_per_second"),
    }


def try_restart(machine: Machine) -> Any:
    """A daemon that ends leaves its engines; the next one adopts them, and they answer."""
    before = machine.engines()
    os.kill(int(machine.ask("ps")["pid"]), 15)
    deadline = time.monotonic() + 60
    while "no daemon runs" not in (said := machine.say("ps")) and time.monotonic() < deadline:
        time.sleep(0.2)
    machine.run("up", "-f", str(machine.stack), "--port", str(PORT), "--detach")
    expect(machine.engines() == before, f"other processes after a restart: {before} {machine.engines()}")
    expect("no daemon runs" in said, f"the daemon did not end: {said}")
    return generate("chat", 16)


def try_too_little(machine: Machine) -> Any:
    """A model that does not fit into its Grant ends with the engine's own out-of-memory error; the others do not notice."""
    before = machine.engines()
    machine.write_stack({"tight": TIGHT})
    said = machine.say("up", "-f", str(machine.stack), "--attach", "--detach")
    expect("not enough GPU memory" in said or "needs" in said, f"tight: {said[-1500:]}")
    left = {instance: pid for instance, pid in machine.engines().items() if not instance.startswith("tight")}
    expect(left == before, "the others were touched")
    return said[-1500:]


def try_down(machine: Machine) -> Any:
    pids = set(machine.engines().values())
    machine.run("down")
    expect(not machine.engines(), f"engines are left: {machine.engines()}")
    left = pids & set(machine.measured())
    expect(not left, f"the driver still lists {left}")
    used = [usage.used_bytes for usage in machine.hardware.read_usage()]
    expect(all(one is None or one < GIB for one in used), f"used after down: {used}")
    return {"used_after": used}


def keep_logs(machine: Machine, out: Path) -> None:
    for log in (machine.home / "runs").glob("*/engine.log"):
        (out / f"{log.parent.name}.log").write_bytes(log.read_bytes()[:200_000])
    daemon = machine.home / "daemon.log"
    if daemon.exists():
        (out / "daemon.log").write_bytes(daemon.read_bytes()[-200_000:])


if __name__ == "__main__":
    sys.exit(main())
