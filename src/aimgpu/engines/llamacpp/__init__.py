"""llama.cpp from the wheel `xllamacpp`, each instance in a child process of its own.

Start with `engine`, which the control plane uses and which never imports the wheel: a CPU that it was not built for kills
whoever imports or uses it. `server` and `probe` are the child processes, and import little else.
"""
