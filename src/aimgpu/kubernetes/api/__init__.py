"""The API server: one client, how to reach it, the kinds of others, quantities, and programs that live with it.

Start at `client.Client` and `mirror.Mirror`, which follows objects; `access` and `kubeconfig` find the server and the
credentials. Not here: names and kinds of our own.
"""
