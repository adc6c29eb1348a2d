"""An integer program over single operations, which tells how good plans are. Needs the extra ``milp``.

Not here: anything that planning itself needs. No TensorFlow.
"""
