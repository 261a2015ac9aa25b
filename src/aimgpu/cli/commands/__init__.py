"""One module per command of `aimgpu`, in a folder per section of its help. `aimgpu.cli.registry` lists them."""
