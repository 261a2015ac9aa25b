"""AIM GPU Sharing on a Kubernetes cluster: programs that run in pods, and what they share.

Start at `agent` (the DaemonSet process of a node) with `dra_driver` and `device_plugin` behind it. `api_client` is the one
door to the API server, `names` holds every name that others see. Not here: placement, which is kube-scheduler's.
"""
