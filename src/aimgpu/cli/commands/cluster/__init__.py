"""Commands that act on a Kubernetes cluster. Imported only for those: the client of the API server takes time to load."""
