"""What a model needs: model, precision, context and concurrency in, a Footprint out, term by term.

Here: formulas, readers of model file headers (given bytes, not paths), the catalogue, AIM profiles. Not here: files, GPUs,
engines. Pure: no I/O, no clock.
"""
