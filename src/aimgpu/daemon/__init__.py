"""The long-running process: controller, gateway, control API, exporter and page on one port.

Start at `assembly.run_daemon`; `python -m aimgpu.daemon` runs it. Not here: deciding, queueing, serving bytes.
"""
