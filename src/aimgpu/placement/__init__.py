"""Where an instance goes: Snapshot and Ask in, Placement or Refusal out.

Here: the Snapshot, choosing, layouts, preemption, explanations. Not here: reading hardware, charging the books, starting
anything. Pure: the same snapshot and Asks give the same answer in every process.
"""
