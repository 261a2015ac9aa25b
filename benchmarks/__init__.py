"""Speed and quality, measured: `python -m benchmarks.NAME` writes `benchmarks/results/NAME.json`."""
