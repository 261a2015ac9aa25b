"""What users, charts and other programs see: names, labels, annotations, custom resources, and how they are read. Pure.

`names` has the constants; `annotations` reads what a pod asks for, `served_model` which model it serves. `sharing_config` reads
NVIDIA's configuration of a device plugin. Not here: I/O, and decisions of one side.
"""
