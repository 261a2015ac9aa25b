"""What Ollama says in its log when a model does not load. The lines were taken from reports of users; each test names where."""

from collections.abc import Iterable

from aimgpu.engines.causes import PORT_TAKEN, find_cause

_CAUSES = {
    "not enough GPU memory": (
        r"cudaMalloc failed: out of memory|CUDA error: out of memory|hipMalloc failed|ROCm error: out of memory"
    ),
    "the model needs {0} of memory, and {1} is free": (
        r"model requires more system memory \(([^)]*)\) than is available \(([^)]*)\)"
    ),
    "not enough memory": r"unable to allocate (?:\w+ )?buffer",
    "the model did not load in time": r"timed out waiting for llama runner to start",
    PORT_TAKEN: r"listen tcp [\d.:]+: bind: address already in use",
    "there is no such model in the registry": r"pull model manifest: file does not exist",
    "a disk is full": r"no space left on device",
    "cannot load {0}": r"aimgpu: cannot load (.*)",
    "the model runner died: {0}": r"llama runner process has terminated: (.+?)\"?$",
}


def read_failure(lines: Iterable[str]) -> str | None:
    """The first known cause, else the last line that reports an error."""
    return find_cause(lines, _CAUSES)
