"""The side of the cluster: admission, the operator, time-slicing of others' device plugins, and the removal of it all.

Start at `admission.review`, `operator.operator` or `uninstall`. `placeable` asks, before anything is applied, whether the GPUs
of the cluster can hold it. Not here: nodes and engines.
"""
