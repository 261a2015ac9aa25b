"""Real programs that tests start in the place of engines."""
