"""Who goes first: priority, admission, SLO windows and error budgets.

Pure: time is passed in as seconds of any steady clock. Start at `dispatcher.Dispatcher` (what waits and what starts),
`tracker.ObjectiveTracker` (what was promised and what was kept) and `pressure.PressureGauge` (how the second moves the
first). The gateway, the library surface and the benchmarks all run this code.
"""
