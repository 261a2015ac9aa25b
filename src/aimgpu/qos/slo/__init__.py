"""What was promised and what was kept: windows, error budgets, burn rates, pressure."""
