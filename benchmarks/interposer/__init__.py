"""Any preloadable shim beside none and ours, on the same software GPU in the same run."""
