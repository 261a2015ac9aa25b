"""Admission: annotations on pods and InferenceServices become claims for GPU shares, or are refused with the reason.

Start at `review.review_pod`. Reading annotations, building claims and patching pods are pure; `server` answers the API server,
`certificates` keeps what it serves valid. Not here: placing (kube-scheduler's) and enforcing (the node agent's).
"""
