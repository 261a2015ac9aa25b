"""Commands that size models and keep what is known about them."""
