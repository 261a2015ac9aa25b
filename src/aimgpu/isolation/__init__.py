"""What makes a grant true: limits, masks, environment, and the watchdog that checks.

A mechanism reports the level that it really gives. Not here: deciding who gets a grant.
"""
