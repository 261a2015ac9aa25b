"""Carrying out plans: what is reserved meanwhile, whose turn it is, and the threads it runs in."""
