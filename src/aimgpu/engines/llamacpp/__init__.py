"""llama.cpp: `llama-server` where there is a GPU, else the wheel `xllamacpp`, each instance in a process of its own.

Start with `engine`, which chooses between the two and is what the control plane uses. `program` finds a `llama-server`;
`arguments` builds its flags and `log` reads its output. `wheel` never imports the wheel: on a CPU that it was not built for
the importing process dies. `server` and `probe` are the child processes that do, and import little else.
"""
