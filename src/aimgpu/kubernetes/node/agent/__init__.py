"""The process of a node's DaemonSet pod: GPUs, the DRA driver or the device plugin, labels, metrics.

Start at `agent.Agent`; `python -m aimgpu.kubernetes.node.agent --help` lists what can be set. `wiring` names concrete backends.
"""
