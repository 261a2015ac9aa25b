"""The tenants of the isolation benchmark: one process each, started with `python -m benchmarks.isolation_h200.workloads KIND`.

A tenant prints READY, then follows the orders on its standard input until that ends: `GO seconds` (a server also takes a seed
for its pauses, and whether its requests are announced), `RUN` (a hog, until the next line) and `CALLS seconds [paused]`. It
answers each with one line of JSON, and between two orders it has nothing on the device.
"""

import argparse
import contextlib
import ctypes
import json
import random
import select
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from aimgpu.isolation.critical_signal import CriticalSignal
from benchmarks.isolation_h200.calls import time_calls

GEMM = 8192
HIDDEN, FEED_FORWARD, LAYERS, BATCH = 4096, 11008, 16, 8
STEPS, PAUSE_SECONDS = 20, 0.05


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("--signal", help="region:tenant whose requests are announced")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pause", type=float, default=PAUSE_SECONDS)
    parser.add_argument("--size", type=int, default=GEMM, help="of a hog's matrices")
    arguments = parser.parse_args()
    KINDS[arguments.kind](arguments)


def orders() -> Iterator[list[str]]:
    print("READY", flush=True)
    while line := sys.stdin.readline():
        yield line.split()


def report(result: dict[str, Any]) -> None:
    print(json.dumps(result), flush=True)


def open_signal(text: str | None) -> Any:
    if text is None:
        return SILENCE
    path, _, tenant = text.partition(":")
    return CriticalSignal.open(Path(path), tenant)


def serve(
    arguments: argparse.Namespace,
    request: Callable[[], list[float]],
    calls: Callable[[float, float], dict[str, Any]] | None = None,
) -> None:
    """Requests with exponential pauses between them; the time of each request and each of its steps."""
    for _ in range(5):
        request()
    signal = open_signal(arguments.signal)
    for order, seconds, *rest in orders():
        if order == "CALLS" and calls is not None:
            report(calls(float(seconds), arguments.pause if rest else 0.0))
            continue
        seed, announced = int(rest[0]) if rest else arguments.seed, not rest or rest[1] == "signal"
        dice = random.Random(seed)  # noqa: S311 pauses
        result = serve_window(request, float(seconds), dice, arguments.pause, signal if announced else SILENCE)
        print("DONE", flush=True)
        report(result)


def serve_window(
    request: Callable[[], list[float]], seconds: float, dice: random.Random, pause: float, signal: Any
) -> dict[str, Any]:
    begun = time.monotonic()
    starts, requests, steps = [], [], []
    while time.monotonic() < begun + seconds:
        starts.append(time.monotonic())
        with signal:
            steps += request()
        requests.append(time.monotonic() - starts[-1])
        time.sleep(dice.expovariate(1 / pause))
    ended, busy = time.monotonic(), sum(requests)
    return {"begun": begun, "ended": ended, "starts": starts, "requests": requests, "steps": steps, "busy": busy}


def decode(arguments: argparse.Namespace) -> None:
    """Decoding, as memory-bound as it is in life: 16 layers of a 7B model's width, one CUDA graph a step."""
    torch.manual_seed(0)
    shapes = [(HIDDEN, HIDDEN)] * 4 + [(HIDDEN, FEED_FORWARD)] * 2 + [(FEED_FORWARD, HIDDEN)]
    layers = [[torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02 for shape in shapes] for _ in range(LAYERS)]
    start = torch.randn(BATCH, HIDDEN, device="cuda", dtype=torch.bfloat16)

    def step() -> Any:
        x = start
        for query, key, value, out, gate, up, down in layers:
            x = x + ((x @ query) * (x @ key) + x @ value) @ out
            x = torch.nn.functional.rms_norm(x, (HIDDEN,))
            x = x + (torch.nn.functional.silu(x @ gate) * (x @ up)) @ down
            x = torch.nn.functional.rms_norm(x, (HIDDEN,))
        return x

    graph = capture(step)

    def request() -> list[float]:
        times = []
        for _ in range(STEPS):
            begun = time.monotonic()
            graph.replay()
            torch.cuda.synchronize()
            times.append(time.monotonic() - begun)
        return times

    def calls(seconds: float, pause: float) -> dict[str, Any]:
        kept = capture(step, keep=True)
        return time_calls(kept.raw_cuda_graph(), seconds, STEPS if pause else 1, pause)

    serve(arguments, request, calls)


class Block(torch.nn.Module):  # type: ignore[misc]
    """One layer with a cache of fixed size, so that a decode step can be a CUDA graph, as engines do it."""

    width, heads, context, batch = 4096, 32, 1024, 4

    def __init__(self) -> None:
        super().__init__()
        width = self.width
        self.qkv = torch.nn.Linear(width, 3 * width, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.up = torch.nn.Linear(width, 4 * width, bias=False)
        self.down = torch.nn.Linear(4 * width, width, bias=False)
        whole = (self.batch, self.heads, self.context, width // self.heads)
        self.keys, self.values = (torch.zeros(whole, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def forward(self, x: Any, at: int) -> Any:
        count, norm = x.shape[1], torch.nn.functional.rms_norm
        shape = (self.batch, count, self.heads, self.width // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(norm(x, (self.width,))).chunk(3, -1))
        self.keys[:, :, at : at + count] = k
        self.values[:, :, at : at + count] = v
        seen = at + count
        attend = torch.nn.functional.scaled_dot_product_attention
        y = attend(q, self.keys[:, :, :seen], self.values[:, :, :seen], is_causal=count > 1)
        x = x + self.out(y.transpose(1, 2).reshape(self.batch, count, self.width))
        return x + self.down(torch.nn.functional.silu(self.up(norm(x, (self.width,)))))


def transformer(arguments: argparse.Namespace) -> None:
    """A whole transformer with random weights: 4 prompts of 512 tokens launched kernel by kernel, then 24 decode steps."""
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    blocks = torch.nn.ModuleList(Block() for _ in range(LAYERS)).to("cuda", torch.bfloat16)
    prompt = torch.randn(Block.batch, 512, Block.width, device="cuda", dtype=torch.bfloat16)
    token = prompt[:, -1:].clone()

    def run(x: Any, at: int) -> Any:
        for block in blocks:
            x = block(x, at)
        return x

    graph = capture(lambda: run(token, 768))

    def request() -> list[float]:
        times = []
        for position in range(25):
            begun = time.monotonic()
            if position == 0:
                run(prompt, 0)
            else:
                graph.replay()
            torch.cuda.synchronize()
            times.append(time.monotonic() - begun)
        return times

    serve(arguments, request)


def capture(step: Callable[[], Any], *, keep: bool = False) -> Any:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True) if keep else torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def gemm(arguments: argparse.Namespace) -> None:
    """A hog: large matrix products without pause."""
    size = arguments.size
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)
    hog(lambda: torch.mm(a, b, out=c), units_each=2 * size**3, ahead=8 if size <= GEMM else 2)


def train(_: argparse.Namespace) -> None:
    """A hog with many kernels of all sizes: training steps of a small transformer."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True, device="cuda", dtype=torch.bfloat16)
    model = torch.nn.TransformerEncoder(layer, 8, enable_nested_tensor=False).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = torch.randn(16, 512, 1024, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        loss = model(data).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    hog(step, units_each=1, ahead=2)


def hog(step: Callable[[], Any], *, units_each: int, ahead: int) -> None:
    """Work until the time is over or the next line comes; marks record when how much was done, for any window within."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    for order, *rest in orders():
        if order == "RUN":
            print("BEGUN", flush=True)
            result = hog_window(step, lambda: bool(select.select([sys.stdin], [], [], 0)[0]), ahead)
            sys.stdin.readline()  # one line per order: nothing can wait in the buffer behind it
        else:
            until = time.monotonic() + float(rest[0])
            result = hog_window(step, lambda until=until: time.monotonic() >= until, ahead)  # type: ignore[misc]
        report({**result, "units_each": units_each})


def hog_window(step: Callable[[], Any], is_over: Callable[[], bool], ahead: int) -> dict[str, Any]:
    begun, done = time.monotonic(), 0
    marks = [(begun, 0)]
    pending: list[Any] = []
    while not is_over():
        step()
        event = torch.cuda.Event()
        event.record()
        pending.append(event)
        if len(pending) >= ahead:
            pending.pop(0).synchronize()
            done += 1
            marks.append((time.monotonic(), done))
    torch.cuda.synchronize()
    return {"begun": begun, "ended": time.monotonic(), "marks": marks}


def memory(arguments: argparse.Namespace) -> None:
    """Takes all the memory that it can get, each process in another way, and keeps it until told to end."""
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    take = TAKERS[arguments.seed % len(TAKERS)]
    next(orders())
    allocated = take(random.Random(arguments.seed))  # noqa: S311 sizes
    print("HELD", flush=True)
    sys.stdin.readline()
    properties = torch.cuda.get_device_properties(0)
    report(
        {
            "way": take.__name__,
            "allocated": allocated,
            "free_at_start": free,
            "total": total,
            "properties_total": properties.total_memory,
        }
    )


def take_tensors(dice: random.Random) -> int:
    """PyTorch's own allocator; with expandable segments where its settings say so."""
    held = []
    for size in (1 << 30, 64 << 20, 2 << 20):
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            while True:
                held.append(torch.empty(size + (2 << 20) * dice.randrange(2), dtype=torch.uint8, device="cuda"))
    HELD.extend(held)
    return int(torch.cuda.memory_reserved())


def take_plainly(dice: random.Random) -> int:
    """The driver's plainest call, with sizes that it rounds up."""
    return take_by(lambda cuda, pointer, size: cuda.cuMemAlloc_v2(pointer, size), dice)


def take_from_pool(dice: random.Random) -> int:
    """Stream-ordered allocation from the device's pool."""
    return take_by(lambda cuda, pointer, size: cuda.cuMemAllocAsync(pointer, size, None), dice)


def take_by(allocate: Callable[[Any, Any, Any], int], dice: random.Random) -> int:
    cuda, allocated = ctypes.CDLL("libcuda.so.1"), 0
    for most in (1 << 30, 64 << 20, 3 << 20, 1 << 16):
        refusals = 0
        while refusals < 3:  # noqa: PLR2004 others free nothing: one refusal is enough, three are sure
            size = dice.randrange(most // 2, most) + 1
            if allocate(cuda, ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(size)) == 0:
                allocated += size
            else:
                refusals += 1
    cuda.cuCtxSynchronize()
    return allocated


SILENCE = contextlib.nullcontext()
HELD: list[Any] = []
TAKERS = (take_tensors, take_tensors, take_plainly, take_from_pool)

KINDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "decode": decode,
    "transformer": transformer,
    "gemm": gemm,
    "train": train,
    "memory": memory,
}

if __name__ == "__main__":
    main()
