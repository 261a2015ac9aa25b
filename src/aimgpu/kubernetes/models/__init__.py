"""The side of served models: stacks as objects of the cluster, the gateway that finds them, and the page that shows them.

Start at `serving.manifests`, `gateway.service` or `page.service`. Not here: which GPU a pod gets.
"""
