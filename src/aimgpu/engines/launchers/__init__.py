"""Where engines run: `process` starts them on this machine, detached, so that they outlive a restart of the daemon.

A Launcher starts, finds again and stops; it knows nothing of models, health or restarts. `proc` reads Linux's /proc.
"""
