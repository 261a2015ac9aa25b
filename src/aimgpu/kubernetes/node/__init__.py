"""What a node gives to containers, whoever asks: grants in the ledger, layouts, isolation, and what a container must be given.

The DRA driver and the device plugin stand on it. Not here: gRPC, the Kubernetes API.
"""
