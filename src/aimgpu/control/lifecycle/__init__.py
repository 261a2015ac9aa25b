"""Carrying out steps: starting, draining and stopping instances."""
