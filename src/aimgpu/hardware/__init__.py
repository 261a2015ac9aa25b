"""Devices: read them, change their layouts, read their usage.

`protocols` says what a backend offers; `amd`, `nvidia` and `simulated` are backends. Not here: who gets what.
"""
