"""Control under simulated time: one thread at a time, in an order drawn from a seed, with faults and crashes.

`scheduler.py` runs the threads. `effects.py` stands in for clock, locks and threads, `world.py` for the machine. `schedules.py`
draws what users do and what breaks, and checks what must hold afterwards. `put_back.py` has faults that it must find. By hand:
`python -m tests.simulation --help`.
"""
