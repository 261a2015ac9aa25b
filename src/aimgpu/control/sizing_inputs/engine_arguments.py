"""Flags that a user passes to an engine and that change what it takes: the sizing must know them."""

from dataclasses import replace

from aimgpu.domain import EngineOverrides
from aimgpu.errors import InvalidInput
from aimgpu.sizing import SizingRequest

_FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2")


def with_engine_arguments(request: SizingRequest, overrides: EngineOverrides) -> SizingRequest:
    """VLLM's --kv-cache-dtype, --enforce-eager and --max-num-batched-tokens."""
    if request.engine != "vllm":
        return request
    given = {name: values for name, *values in overrides.arguments}
    kind = " ".join(given.get("kv-cache-dtype", ()))
    if kind in _FP8:
        request = replace(request, kv_precision="fp8")
    if "enforce-eager" in given:
        request = replace(request, graphs=False)
    if "max-num-batched-tokens" in given:
        text = " ".join(given["max-num-batched-tokens"])
        if not text.isdecimal():
            raise InvalidInput(f"--max-num-batched-tokens {text!r} is not a whole number", hint="For example 2048.")
        request = replace(request, batched_tokens=int(text))
    return request
