"""The side of a node: the agent, what it offers to the kubelet, and what it gives to containers.

Start at `agent.agent`. `dra_driver`, `device_plugin` and `kai` are three ways in which pods get GPUs. They stand on grants in
the ledger, layouts, isolation and `cdi`, the edits that a container needs. `kubelet_api` and `grpc_server`: the kubelet's gRPC.
"""
