"""A training step as data: values, operations, units, cuts and segments; their order, liveness and text form.

Not here: what operations cost (``cost``) and what a schedule of them needs (``judge``). No TensorFlow.
"""
