"""Speed and quality, measured: `python -m benchmarks.NAME.run` writes `benchmarks/results/NAME.json`."""
