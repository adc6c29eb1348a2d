"""Operations and graphs of TensorFlow: what they tell of themselves, and copying them.

Not here: what a model is made of (``program``), and what is done only for equal bits (``parity``).
"""
