"""One run of one instance: its folder, environment, record in the ledger, liveness and readiness."""
