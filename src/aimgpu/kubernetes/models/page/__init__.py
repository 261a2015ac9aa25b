"""The Model Manager page for a cluster: GPUs, models and promises of all nodes, and changes with the rights of who makes them.

Start at `service.serve_page`. `observed` turns objects of the API server into what the page shows; `follower` follows them;
`control_api` applies, removes and scales; `callers` decides with whose rights; `chat_proxy` reaches the gateways.
"""
