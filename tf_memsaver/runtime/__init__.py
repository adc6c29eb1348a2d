"""How one segment is recomputed in the backward pass, under the contract of ``tf.recompute_grad``.

Not here: which calls make a segment (``rewrite``).
"""
