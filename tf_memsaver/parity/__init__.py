"""What is done only so that results keep their bits: names, order, and what TensorFlow's optimizer makes of them.

Not here: what makes results right and memory small; that works without this room.
"""
