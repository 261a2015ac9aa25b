"""Commands about this machine: its GPUs, its partitions, what was found on it."""
