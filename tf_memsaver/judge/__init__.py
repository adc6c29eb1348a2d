"""The only judge of a plan: its schedule, the bytes that are live in it, and what the allocator makes of them.

Not here: how plans are found (``search``, ``planners``). No TensorFlow.
"""
