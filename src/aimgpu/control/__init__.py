"""The one-way flow of a deployment: snapshot, size, place, plan, act, record.

Start at `controller.Controller`. Decisions (`plan`, `repair`) are apart from effects (`lifecycle`, `partitioning`). Knows rooms
below by their protocols only; concrete backends are chosen by the wiring.
"""
