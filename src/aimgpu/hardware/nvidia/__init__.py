"""NVIDIA GPUs through NVML: devices, processes, MIG, MPS."""
