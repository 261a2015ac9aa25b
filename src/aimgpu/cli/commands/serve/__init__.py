"""Commands that start, stop, change and talk to models."""
