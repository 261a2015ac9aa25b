"""AIM GPU Sharing: many models on one GPU, each with what it was promised.

Users script against `aimgpu.runtime`; the command is `aimgpu.cli`. The rooms below stand in layers that
`make check` enforces; each room's docstring says what belongs there.
"""
