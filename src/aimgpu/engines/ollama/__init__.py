"""Ollama: one server per instance, so that each has its own grant; `engine` is the door, `start` what is started.

Ollama loads a model at its first request, and stops loading when that request's client goes away. So `start` leaves a small
child beside the server that fetches the model, gives it the deployment's name and asks for one token.
"""
