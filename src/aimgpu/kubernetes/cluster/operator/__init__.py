"""The operator: one GpuShare per workload that says what it got and why not, and PartitionPlans carried out node by node.

Start at `operator.Operator`. What is wanted of an object is computed by pure functions (`shares`, `plan_phases`); the loops
write only what differs. One of several replicas leads (`leader`). Plans cordon and taint
nodes and evict pods; other foreign objects are only read. Why not kopf: docs/decisions/0015-own-operator-loop.md.
"""
