"""One instance: its start, its sleep, its end, its folder, and what is asked of its engine."""
