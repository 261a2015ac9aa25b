"""The page, and the part of the HTTP API that only the page uses.

Start at `routes.PageApplication`; `sources.Sources` is everything it reads, `live` pushes it to open tabs, `assets` serves the
files in `page/`. Not here: model traffic (`gateway`), and the control API, which is the daemon's.
"""
