"""Models and functions that train by a plan, over the original's layers and variables.

Not here: how a segment is recomputed (``runtime``) and how results are stored (``saved``).
"""
