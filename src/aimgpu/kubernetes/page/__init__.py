"""The Model Manager page for a cluster: shows GPUs, models and promises of all nodes, and changes nothing.

Start at `service.serve_page`. `observed` turns objects of the API server into what the page shows; `follower` follows them.
"""
