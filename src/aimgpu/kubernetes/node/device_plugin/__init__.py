"""A device plugin: GPUs and partitions as extended resources, several replicas of each, for clusters without DRA.

`sharing_config` reads NVIDIA's sharing configuration, for both vendors. `resources` and `allocation` are pure: GPUs and a
configuration in, replicas out. `plugin` serves one resource to the kubelet, `plugins` keeps all of them registered.
"""
