"""What planners search with: tables of costs, labels, one level of segments, several levels, repeats, bounds.

Not here: what a user can ask for by name (``planners``). No TensorFlow.
"""
