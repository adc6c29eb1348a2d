"""The strategies that a user can ask for by name, and ``solve``, which certifies what they propose.

Not here: how the search works (``search``). No TensorFlow.
"""
