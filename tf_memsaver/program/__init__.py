"""A model as a program: a flat list of calls that can be run one by one, whatever kind of model it is (``kinds``).

Not here: the traced training step (``capture``) and how calls run in segments (``rewrite``).
"""
