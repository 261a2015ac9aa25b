"""Time-slicing of GPUs by a device plugin, NVIDIA's or ours: how many replicas, the ConfigMap, its installation and its faults.

Time-slicing alone isolates nothing; `ISOLATION` says what that means and what the node agent adds. Start at
`recommendation` for the number of replicas and at `changes` for what is written into a cluster.
"""

ISOLATION = (
    "Time-slicing alone isolates nothing: every pod can allocate all memory of the GPU and take as much compute as it likes, "
    "and a fault of one can end the others. With the node agent of AIM GPU Sharing as the device plugin each replica is held "
    "to its part of the memory and, with `isolation: enforced`, of the compute."
)
