"""Engine processes that have imported their packages before anybody starts a model.

`processes` keeps them, in the daemon. `program` is what they run, in the engine's own interpreter; it imports nothing of ours.
A start that cannot use one is a plain start: nothing here ever raises into it.
"""
