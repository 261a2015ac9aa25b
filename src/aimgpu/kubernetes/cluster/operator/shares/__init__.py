"""GpuShares: what each workload holds of GPUs, or why it waits, whichever way its pods ask for them.

A pod asks by a claim (made by admission, or its own), by a limit that kube-scheduler answers with a claim, or by a limit of
what the node agent's device plugin offers. Start at `loop.ShareLoop`; what a GpuShare says is computed by
`status.share_status` from the pods (`pod_gpus`) and the indexes, without I/O. What is not known is left out.
"""
