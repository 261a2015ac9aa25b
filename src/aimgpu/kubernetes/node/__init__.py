"""What a node gives to containers: grants in the ledger, layouts, isolation, and the edits that a container needs.

The DRA driver and the device plugin stand on it. Not here: gRPC, the Kubernetes API.
"""
