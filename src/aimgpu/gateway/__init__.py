"""The OpenAI front door: finds the Instance for a model's name and passes bytes through.

Not here: the control API and the page (`web`), deciding what runs (`control`).
"""
