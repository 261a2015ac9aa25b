"""How many devices a set of models or rates needs."""
