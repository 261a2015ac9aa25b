"""The small library surface that people script against, thin over the rooms below."""
