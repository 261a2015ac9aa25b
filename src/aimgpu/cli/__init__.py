"""The command line: one file a command group, imported only when called; `wiring` chooses the concrete parts."""
