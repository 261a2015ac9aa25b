"""Other APIs than OpenAI's chat: each request becomes one or more requests to an engine, each answer is translated back.

Start at `table.find_operation`. An operation gets a `Call` and answers it; `Call.serve` is one request through the gateway's
queue, slots and proxy. Nothing here reaches an engine by another way.
"""
