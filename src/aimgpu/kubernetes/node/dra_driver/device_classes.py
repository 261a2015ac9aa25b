"""The DeviceClasses of the driver, as the chart installs them."""

from typing import Any

from aimgpu.kubernetes.vocabulary import names

_OURS = f"device.driver == '{names.DRIVER}'"
_ATTRIBUTES = f"device.attributes['{names.DRIVER}']"


def device_classes() -> list[dict[str, Any]]:
    """Whole GPUs, partitions, shares of what exists, shares of partitions that may have to be made, and KAI's pods."""
    divisible = _is_a(names.TYPE_DIVISIBLE)
    shares = f"{_ATTRIBUTES}.type in ['{names.TYPE_SHARED}', '{names.TYPE_DIVISIBLE}']"
    whole = f"({_is_a(names.TYPE_WHOLE)} || {divisible} && !{_ATTRIBUTES}.partitioned)"
    partition = f"({_is_a(names.TYPE_PARTITION)} || {divisible} && {_ATTRIBUTES}.partitioned)"
    return [
        _device_class(names.WHOLE_CLASS, whole, names.WHOLE_RESOURCE),
        _device_class(names.PARTITION_CLASS, partition, names.PARTITION_RESOURCE),
        _device_class(names.SHARED_CLASS, f"{shares} && {_ATTRIBUTES}.current", names.SHARED_RESOURCE),
        _device_class(names.SHARED_PARTITION_CLASS, f"{shares} && {_ATTRIBUTES}.partitioned", None),
        _device_class(names.SEAT_CLASS, _is_a(names.TYPE_SEAT), None),
    ]


def _is_a(kind: str) -> str:
    return f"{_ATTRIBUTES}.type == '{kind}'"


def _device_class(name: str, expression: str, resource: str | None) -> dict[str, Any]:
    spec: dict[str, Any] = {"selectors": [{"cel": {"expression": f"{_OURS} && {expression}"}}]}
    if resource is not None:
        spec["extendedResourceName"] = resource
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/part-of": "aim-gpu-sharing"}},
        "spec": spec,
    }
