"""Why nothing fits, and what would make it fit."""
