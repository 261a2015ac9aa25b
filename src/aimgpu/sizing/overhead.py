"""What a process holds on the device besides weights, cache and activations. Constants, with where they come from."""

from aimgpu.domain import Exactness, Term, Vendor
from aimgpu.sizing.engines.llamacpp import ubatch
from aimgpu.sizing.request import SizingRequest
from aimgpu.units import MIB

# A CUDA context with torch's kernels took 619 MiB on an H200 (benchmarks/results/sizing_gpu.json). A HIP process took 1.35 GiB
# beyond its buffers on the one card where that was measured; here 1100 MiB of it are the context, the rest the libraries.
CONTEXT_BYTES = {Vendor.NVIDIA: 620 * MIB, Vendor.AMD: 1100 * MIB}
_NON_TORCH_BYTES = {"vllm": 200 * MIB, "llamacpp": 64 * MIB, "ollama": 64 * MIB}  # vLLM logs 0.05 to 0.35 GiB
_AMD_LIBRARY_BYTES = 192 * MIB
_COMMUNICATION_BYTES = 350 * MIB  # buffers of a process group, per GPU
# cuBLAS workspace as PyTorch asks for it: 32 MiB from Hopper on, before that 8 MiB and 128 KiB.
_SMALL_WORKSPACE_BYTES = 8 * MIB + (128 << 10)
_WORKSPACE_BYTES = 32 * MIB
# llama.cpp gives cuBLAS another workspace beside its own: 32 MiB from Hopper on, before that 4 (common.cuh of build 11549). On
# an H200 all that is not in its buffers took 100 to 102 MiB and the pool below (tests/live/llamacpp_live.py, three models).
_SMALL_GGML_WORKSPACE_BYTES = 4 * MIB
_GGML_ENGINES = ("llamacpp", "ollama")
_HALF = 2
_SMALL_WORKSPACE_PARTS = ("A100", "A10", "A30", "A40", "A6000", "L4", "L40", "T4", "V100", "RTX")


def engine_term(request: SizingRequest) -> Term:
    """Workspaces of libraries and communication buffers."""
    own = _NON_TORCH_BYTES.get(request.engine, _workspace_bytes(request))
    if request.engine in _GGML_ENGINES and request.vendor is Vendor.NVIDIA:
        own += _workspace_bytes(request) + _ggml_workspace_bytes(request)
    pool = _pool_bytes(request) if request.engine in _GGML_ENGINES else 0
    libraries = _AMD_LIBRARY_BYTES if request.vendor is Vendor.AMD else 0
    groups = _COMMUNICATION_BYTES if request.tensor_parallel > 1 and request.engine == "vllm" else 0
    return Term(
        name="engine",
        memory_bytes=own + pool + libraries + groups,
        exactness=Exactness.ESTIMATED,
        formula="libraries' workspaces and communication buffers, constants per engine and vendor",
        inputs={"engine_bytes": own + pool, "library_bytes": libraries, "communication_bytes": groups},
    )


def context_term(request: SizingRequest) -> Term:
    """The driver context of one process."""
    return Term(
        name="context",
        memory_bytes=CONTEXT_BYTES[request.vendor],
        exactness=Exactness.ESTIMATED,
        formula="what a process holds on the device before its first tensor, a constant per vendor",
        inputs={"vendor": request.vendor.value},
    )


def _workspace_bytes(request: SizingRequest) -> int:
    return _SMALL_WORKSPACE_BYTES if _is_small(request) else _WORKSPACE_BYTES


def _ggml_workspace_bytes(request: SizingRequest) -> int:
    return _SMALL_GGML_WORKSPACE_BYTES if _is_small(request) else _WORKSPACE_BYTES


def _pool_bytes(request: SizingRequest) -> int:
    """A micro-batch in 16 bits before and after the widest product, which ggml keeps for the libraries beside its buffers."""
    shape = request.model.architecture
    if shape is None:
        return 0
    return ubatch(request) * (shape.hidden_size + max(shape.intermediate_size, shape.expert_intermediate_size)) * _HALF


def _is_small(request: SizingRequest) -> bool:
    return request.gpu is not None and request.gpu.upper().startswith(_SMALL_WORKSPACE_PARTS)
