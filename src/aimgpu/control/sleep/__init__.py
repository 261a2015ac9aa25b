"""Idle models: who may be unloaded, engines that sleep in place, and what they hold meanwhile."""
