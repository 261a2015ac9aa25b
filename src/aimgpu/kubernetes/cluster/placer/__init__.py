"""Says where kube-scheduler looks first: a gated pod gets `nominatedNodeName`, then its gate goes. Allocates nothing.

Start at `placer.py` (what is followed and written). `world.py` decides, with the engine of `aimgpu.placement`; `pods.py`,
`rules.py` and `claims.py` read what Kubernetes objects say; `policy.py` is what the API server lets the operator write.
"""
