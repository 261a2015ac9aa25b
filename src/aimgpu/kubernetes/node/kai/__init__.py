"""Enforcement for pods that KAI-Scheduler places: the cap of a pod is what KAI granted it.

KAI decides which pods share a GPU and enforces nothing. Admission gives each such pod a claim for a *seat*: a device without
size that the node agent publishes. KAI allocates the seat as it allocates any claim, so the kubelet calls the agent before the
pod's containers start, and the agent reads from KAI's own records (`granted`) which GPU and how much of it the pod has.
"""
