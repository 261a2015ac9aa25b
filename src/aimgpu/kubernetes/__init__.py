"""The operator, admission, device plugin, DRA driver, and what meets KServe and KAI-Scheduler.

Its `wiring` module, like `cli.wiring`, is the only place here that may name concrete backends.
"""
