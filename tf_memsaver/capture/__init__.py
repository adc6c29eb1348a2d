"""A training step of a program, traced and turned into a graph for planners.

Not here: what a model consists of (``program``). Nothing is run but, for measured times, single operations.
"""
