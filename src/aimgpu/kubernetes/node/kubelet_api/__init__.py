"""gRPC between plugins and the kubelet: messages compiled from the .proto files beside this one (`make protos`).

The files were written from the field numbers of the published API, one per package, under names of their own: upstream calls
each of them api.proto, and Python's descriptor pool takes only one file of a name.
"""
