"""The driver for dynamic resource allocation: publishes what GPUs can give, and prepares what kube-scheduler decided.

`candidates` and `resource_slices` are pure: GPUs in, ResourceSlices out. `preparation` makes an allocation true on the node and
undoes it, whatever crashed before. `service` is the gRPC side for the kubelet, `publisher` the API side.
"""
