"""The section `llamacpp`: ten shapes and settings of llama.cpp with `gpu: auto`, then three of them under overload.

Needs a `llama-server` for the GPU (on PATH or in AIMGPU_LLAMA_SERVER) and `--tokenizer FILE.gguf`. Weights are random numbers.
The overload is that of `make bench-qos-live`: high, medium and low requests at 1.5 times what the three models do together.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.engines_h200.daemon import URL
from benchmarks.engines_h200.load import whole_answer
from benchmarks.engines_h200.rows import start_row
from benchmarks.random_gguf import SHAPES, write_random_model

if TYPE_CHECKING:
    from benchmarks.engines_h200.run import Run

ROOT = Path(__file__).parents[2]
MODELS: dict[str, dict[str, Any]] = {
    "small": {"shape": "135m", "context": 2048, "concurrency": 8},
    "single": {"shape": "135m", "context": 8192, "concurrency": 1},
    "one": {"shape": "1b", "context": 4096, "concurrency": 4},
    "many": {"shape": "1b", "context": 4096, "concurrency": 32},
    "long": {"shape": "1b", "context": 65_536, "concurrency": 1},
    "tall": {"shape": "135m", "context": 32_768, "concurrency": 4},
    "three": {"shape": "3b", "context": 8192, "concurrency": 2},
    "wide": {"shape": "3b", "context": 4096, "concurrency": 16},
    "three-q8": {"shape": "3b-q8", "context": 4096, "concurrency": 8},
    "eight-q8": {"shape": "8b-q8", "context": 8192, "concurrency": 4},
}
REPLAYED = {f"m{number}": {"shape": "135m", "context": 8192, "concurrency": 16} for number in range(3)}
_REPLAY_SECONDS = 280  # two rounds of two blocks, with what is measured before
_REPLAY = (
    *("--slots", "16", "--context", "8192"),
    *("--seconds", "40", "--warm-seconds", "8", "--measure-seconds", "4", "--warm-up-limit", "30"),
    *("--rounds", "2", "--measure-every", "2", "--others-every", "99"),
)


def run_llamacpp(run: "Run") -> dict[str, Any]:
    """All at once; each answers once before the driver is asked."""
    if run.given.tokenizer is None:
        return {"left_out": "needs --tokenizer FILE.gguf"}
    found: dict[str, Any] = {"rows": []}
    run.results["sections"]["llamacpp"] = found
    done = run.apply({name: _entry(run, given) for name, given in MODELS.items()}, replace=True)
    run.say(f"llamacpp: {done['seconds']} s {done['error'] or ''} {done['steps']}")
    answered = {name: whole_answer(URL, name, 16)[0] for name in MODELS}
    driver = run.daemon.driver_bytes()
    for name, given in MODELS.items():
        found["rows"].append(start_row(name, done, driver, given["shape"]) | {"answered_tokens": answered[name]})
        run.say(str(found["rows"][-1]))
    run.daemon.keep_logs(list(MODELS))
    run.save()
    found["replay"] = run_replay(run)
    return found


def _entry(run: "Run", given: dict[str, Any]) -> dict[str, Any]:
    shape = given["shape"]
    path = run.given.folder / "models" / f"random-{shape}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_random_model(run.given.tokenizer, path, SHAPES[shape])
    entry = {key: value for key, value in given.items() if key != "shape"}
    return {"engine": "llamacpp", "model": str(path), "gpu": "auto", **entry}


def run_replay(run: "Run") -> dict[str, Any]:
    """Two rounds, ours and FIFO and then FIFO and ours, with what is left of the time."""
    if run.left < _REPLAY_SECONDS:
        return {"left_out": f"{run.left:.0f} s were left, about {_REPLAY_SECONDS} are needed"}
    done = run.apply({name: _entry(run, given) for name, given in REPLAYED.items()}, replace=True)
    run.say(f"replay: started in {done['seconds']} s {done['error'] or ''}")
    folders = [str(run.daemon.home.path / "runs" / str(done["instances"][name]["id"])) for name in REPLAYED]
    name, device = ("qos_live_tried", "a processor") if run.given.simulate else ("qos_live_h200", "one H200")
    result = ROOT / "benchmarks" / "results" / f"{name}.json"
    argv = [sys.executable, "-m", "benchmarks.qos_live.run", "--instance", *folders, *_REPLAY]
    prompt_part, output_part = (200, 8) if run.given.simulate else (1, 1)  # a processor takes requests of another size
    argv += ["--device", device, "--result", name, "--prompt-part", str(prompt_part), "--output-part", str(output_part)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    log = run.out / "qos_live.log"
    try:
        with log.open("w") as output:
            subprocess.run(argv, cwd=ROOT, env=environment, stdout=output, stderr=output, check=True, timeout=run.left)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        return {"failed": type(error).__name__, "output": log.read_text()[-3000:]}
    finally:
        if result.exists():
            (run.out / result.name).write_bytes(result.read_bytes())
    return {"seconds": done["seconds"], "output": log.read_text()[-3000:]}
