"""Where engines run: `process` starts them on this machine, `docker` in containers; both outlive a restart of the daemon.

A launcher starts, finds again and stops; it knows nothing of models, health or restarts. `proc` reads Linux's /proc, `registry`
notes what was started, `docker_api` talks to Docker, `container` turns a Command into a container, `compose` into a file.
"""
