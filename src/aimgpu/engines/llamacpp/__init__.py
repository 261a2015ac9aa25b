"""llama.cpp: `llama-server` where there is a GPU, else the wheel `xllamacpp`, each instance in a process of its own.

Start with `engine`, which chooses between the two and is what the control plane uses. `program` finds a `llama-server`;
`arguments` and `log` are what it is told and what it says. `wheel` never imports the wheel: a CPU that it was not built for
kills whoever imports or uses it. `server` and `probe` are the child processes that do, and import little else.
"""
