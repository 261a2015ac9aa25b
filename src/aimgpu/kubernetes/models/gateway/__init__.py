"""The gateway in a cluster: the same API as on one machine, for models that it finds by their objects.

Start at `service.ClusterGateway`. `served_models` turns Deployments and EndpointSlices into routes (pure), `model_scaler` wakes
models that requests wait for and puts idle ones to sleep, `secret_keys` follows the Secret with the callers' keys. Several
replicas divide the slots of a model, and share when it was last used by a Lease.
"""
