"""What vLLM says in its log. The lines were taken from reports of users; each test names where."""

import re
from collections.abc import Iterable

from aimgpu.engines.causes import PORT_TAKEN, find_cause, parse_size

_PREFIX = re.compile(r"^(\([^)]*\)\s*)?((INFO|WARNING|ERROR|DEBUG)\s+(\d\d-\d\d \d\d:\d\d:\d\d\s+)?(\[[^\]]*\]|\S+:\d+\])\s*)?")
_SHARDS = re.compile(r"checkpoint shards:\s+(\d{1,3})% Completed")
_MISSED = re.compile(
    r"(?:CUDA|HIP) out of memory\. Tried to allocate ([\d.]+ \w+)\. GPU \d+ has a total capacity of [\d.]+ \w+ "
    r"of which ([\d.]+ \w+) is free"
)
_OUT_OF_MEMORY = re.compile(r"(?:CUDA|HIP) out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDA error: out of memory")
_UNKNOWN_SHORTFALL = 256 << 20  # it died of memory and did not say how much more it wanted
# From the last stage to the first, each with what its lines begin to say; the log of a start passes them in the other order.
_STAGES = (
    (
        "first token",
        re.compile(r"Graph capturing finished|Application startup complete|Starting vLLM server|Started server process"),
    ),
    (
        "capturing graphs",
        re.compile(r"Capturing (?:CUDA|cudagraph|HIP)|capturing (?:CUDA|cudagraph)|Profiling CUDA graph", re.IGNORECASE),
    ),
    (
        "compiling",
        re.compile(
            r"Dynamo bytecode transform|torch\.compile takes|Compiling a graph|Cache the graph|"
            r"Using cache directory: .* for vLLM's torch\.compile|Directly load the compiled graph"
        ),
    ),
    ("allocating the KV cache", re.compile(r"Model loading took|GPU KV cache size|reserved .* for KV Cache")),
    ("loading weights", re.compile(r"Starting to load model|Loading (?:safetensors|pt) checkpoint shards|Loading weights")),
)
_CAUSES = {
    "not enough GPU memory: it wanted {0} more, {2} of {1} was free": (
        r"(?:CUDA|HIP) out of memory\. Tried to allocate ([\d.]+ \w+)\. "
        r"GPU \d+ has a total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free"
    ),
    "not enough GPU memory": r"(?:CUDA|HIP) out of memory",
    "only {0} of {1} GiB of the GPU was free at its start, and it was set to take {3} GiB": (
        r"Free memory on device.*?\(([\d.]+)/([\d.]+) GiB\) on startup is less than "
        r"desired GPU memory utilization \(([\d.]+), ([\d.]+) GiB\)"
    ),
    "no memory is left for the KV cache after the weights": r"No available memory for the cache blocks",
    "one request of {0} tokens needs {1} GiB of KV cache, and it has {2} GiB": (
        r"max seq len \((\d+)\),?\s*\(?([\d.]+) GiB KV cache is needed, "
        r"which is larger than the available KV cache memory \(([\d.]+) GiB\)"
    ),
    "one request of {0} tokens does not fit into its KV cache of {1} tokens": (
        r"max seq len \((\d+)\) is larger than the maximum number of tokens that can be stored in KV cache \((\d+)\)"
    ),
    "another process changed the GPU's memory while it measured its own": r"Error in memory profiling",
    PORT_TAKEN: r"[Aa]ddress already in use",
    "the model may not be downloaded without a token (HF_TOKEN)": (
        r"GatedRepoError|401 Client Error|Access to model .* is restricted"
    ),
    "there is no such model": (
        r"Repository Not Found|RepositoryNotFoundError|is not a local folder and is not a valid model identifier"
    ),
    "this vLLM does not know the architecture {0}": (
        r"Model architectures \[(.*?)\] (?:are not supported|failed to be inspected)"
    ),
    "it does not take these arguments: {0}": r"vllm(?: serve)?: error: (.*)",
    "it sees no GPU": r"No (?:CUDA|HIP) GPUs are available|Failed to infer device type",
    "a disk is full": r"No space left on device",
}
_LONGEST_REASON = 400
_LAST_WORD = re.compile(r"^(\w+(?:\.\w+)*(?:Error|Exception)): (.+)")
_EMPTY_WORDS = ("Engine core initialization failed", "Engine process failed to start")
_REFUSED_SETTINGS = re.compile(r"\d+ validation errors? for \w+$")  # pydantic: what is wrong stands in the lines that follow
_REFUSED_SETTING = re.compile(r"^(?:Value error, |Assertion failed, )?(.+?) \[type=\w+, input_")


def read_failure(lines: Iterable[str]) -> str | None:
    """The first known cause, or the last exception that says more than that something failed."""
    plain = [strip_prefix(line) for line in lines]
    if cause := find_cause(plain, _CAUSES):
        return cause
    words = [
        (place, match)
        for place, line in enumerate(plain)
        if (match := _LAST_WORD.match(line)) and not match[2].startswith(_EMPTY_WORDS)
    ]
    if not words:
        return None
    place, last = words[-1]
    refused = _read_refused_settings(plain[place + 1 :]) if _REFUSED_SETTINGS.match(last[2]) else None
    return (f"it refuses its settings: {refused}" if refused else f"{last[1]}: {last[2]}")[:_LONGEST_REASON]


def _read_refused_settings(lines: list[str]) -> str | None:
    """One per line, below the name of its field where it belongs to one."""
    found = []
    for before, line in zip(["", *lines], lines, strict=False):
        if match := _REFUSED_SETTING.match(line):
            found.append(f"{before}: {match[1]}" if re.fullmatch(r"[\w.-]+", before) else match[1])
    return "; ".join(dict.fromkeys(found)) or None


def read_load_percent(lines: Iterable[str]) -> int | None:
    """How much of the weights is loaded; the last word counts."""
    found = [int(percent) for line in lines for percent in _SHARDS.findall(line)]
    return min(found[-1], 100) if found else None


def read_stage(lines: Iterable[str]) -> str:
    """How far the start has come; the last stage of which the log speaks."""
    plain = list(lines)
    return next((stage for stage, pattern in _STAGES if any(map(pattern.search, plain))), "importing")


def read_missing_bytes(lines: Iterable[str]) -> int | None:
    """What it wanted more than was free, from the last refusal; a guess where it names no size; None: memory was not why."""
    plain = list(lines)
    refused = [match for line in plain if (match := _MISSED.search(line))]
    if refused:
        wanted, free = (parse_size(text) for text in refused[-1].groups())
        return max(wanted - free, 1)
    return _UNKNOWN_SHORTFALL if any(map(_OUT_OF_MEMORY.search, plain)) else None


def strip_prefix(line: str) -> str:
    """Without "(EngineCore pid=42) ERROR 06-03 12:30:46 [core.py:396]"."""
    return _PREFIX.sub("", line, count=1).strip()
