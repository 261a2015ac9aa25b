"""What was wanted and what was granted, on disk (SQLite), crash-safe.

The ledger holds the intent before the act. One owner a machine. Not here: deciding, starting, reading hardware.
"""
