"""Applying a plan to a model: segments over its layer calls, and a model of the same class that runs them."""
