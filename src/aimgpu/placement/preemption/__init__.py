"""Plans that move or evict what runs so that something else fits. Start at `planner.plan_for`."""
