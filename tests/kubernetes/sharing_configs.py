"""Sharing configurations, and whether NVIDIA's plugin 0.19.1 takes them; both plugins are run on the same texts."""

UUID = "GPU-b1028956-cfa2-0990-bf4a-5da9abb51763"


def time_slicing(resources: str, extra: str = "") -> str:
    return f"version: v1\nsharing:\n  timeSlicing:\n{extra}    resources: {resources}\n"


TAKEN = {
    "empty": "version: v1\n",
    "no version": "flags: {migStrategy: none}\n",
    "four replicas": time_slicing("[{name: nvidia.com/gpu, replicas: 4}]"),
    "without a vendor": time_slicing("[{name: gpu, replicas: 2}]"),
    "renamed by default": time_slicing("[{name: nvidia.com/gpu, replicas: 2}]", "    renameByDefault: true\n"),
    "no more than one": time_slicing("[{name: nvidia.com/gpu, replicas: 2}]", "    failRequestsGreaterThanOne: true\n"),
    "two resources": time_slicing("[{name: nvidia.com/gpu, replicas: 2}, {name: nvidia.com/mig-1g.5gb, replicas: 3}]"),
    "some devices": time_slicing(f'[{{name: nvidia.com/gpu, replicas: 2, devices: [0, "1:0", "{UUID}"]}}]'),
    "so many devices": time_slicing("[{name: nvidia.com/gpu, replicas: 2, devices: 1}]"),
    "own name": time_slicing("[{name: nvidia.com/gpu, replicas: 2, rename: nvidia.com/slice}]"),
    "mps": "version: v1\nsharing:\n  mps:\n    resources: [{name: nvidia.com/gpu, replicas: 2}]\n",
    "our own block": time_slicing("[{name: nvidia.com/gpu, replicas: 2}]") + "aim: {placement: packed}\n",
}

# The same without what NVIDIA's plugin ignores.
IGNORED = {
    "some devices": time_slicing("[{name: nvidia.com/gpu, replicas: 2}]"),
    "so many devices": time_slicing("[{name: nvidia.com/gpu, replicas: 2}]"),
    "own name": time_slicing("[{name: nvidia.com/gpu, replicas: 2}]"),
}

# It reads these and ends then.
REFUSED_AT_START = {
    "mps and mixed": "version: v1\nflags: {migStrategy: mixed}\n"
    "sharing:\n  mps:\n    resources: [{name: nvidia.com/gpu, replicas: 2}]\n",
}

REFUSED = {
    "version 2": "version: v2\n",
    "one replica": time_slicing("[{name: nvidia.com/gpu, replicas: 1}]"),
    "no replicas": time_slicing("[{name: nvidia.com/gpu}]"),
    "no name": time_slicing("[{replicas: 2}]"),
    "no resources": "version: v1\nsharing: {timeSlicing: {renameByDefault: true}}\n",
    "empty resources": time_slicing("[]"),
    "a bad name": time_slicing("[{name: nvidia.com/GPU_x, replicas: 2}]"),
    "a long name": time_slicing(f"[{{name: nvidia.com/{'g' * 60}, replicas: 2}}]"),
    "text for replicas": time_slicing('[{name: nvidia.com/gpu, replicas: "2"}]'),
    "a fraction of replicas": time_slicing("[{name: nvidia.com/gpu, replicas: 2.5}]"),
    "some as devices": time_slicing("[{name: nvidia.com/gpu, replicas: 2, devices: some}]"),
    "no devices": time_slicing("[{name: nvidia.com/gpu, replicas: 2, devices: 0}]"),
    "a bad device": time_slicing("[{name: nvidia.com/gpu, replicas: 2, devices: [first]}]"),
    "devices as a mapping": time_slicing("[{name: nvidia.com/gpu, replicas: 2, devices: {a: 1}}]"),
    "text for a flag": time_slicing("[{name: nvidia.com/gpu, replicas: 2}]", '    renameByDefault: "yes"\n'),
    "mps with one replica": "version: v1\nsharing:\n  mps:\n    resources: [{name: nvidia.com/gpu, replicas: 1}]\n",
    "a list": "- version: v1\n",
    "not YAML": "version: [v1\n",
}
