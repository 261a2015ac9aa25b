"""Thirty models on one GPU, simulated: who is awake when a request comes, by rule."""
