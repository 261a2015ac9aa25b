"""The page, and the control API that the page and the command line use.

Not here: model traffic (`gateway`).
"""
