"""Who goes first: priority, admission, SLO windows and error budgets.

Pure: time is passed in. The gateway and the isolation room act on what is decided here.
"""
