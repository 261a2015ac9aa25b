"""Commands that decide without changing anything."""
