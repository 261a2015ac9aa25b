"""Programs that are no servers: they stand where an engine stands, and nobody asks them anything."""
