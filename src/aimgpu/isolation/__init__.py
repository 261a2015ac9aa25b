"""What makes a Grant true: limits, masks, environment, and the watchdog that checks.

A mechanism reports the Level that it really gives. Not here: deciding who gets a Grant.
"""
