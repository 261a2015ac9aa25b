"""Programs that are not servers: run like an engine, without requests."""
