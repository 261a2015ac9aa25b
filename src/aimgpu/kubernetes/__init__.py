"""AIM GPU Sharing on a Kubernetes cluster: programs that run in pods, and what they share.

`api` is the one door to the API server, `vocabulary` holds the names and formats that others see. Three sides stand on both
and do not import each other: `node` (the process of a node's DaemonSet pod), `cluster` (admission, operator, time-slicing)
and `models` (the objects of a stack, the gateway, the page). `page` is the program that joins the page with the cluster's
checks. Not here: placement, which is kube-scheduler's.
"""
