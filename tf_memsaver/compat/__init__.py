"""Everything private of Keras and of TensorFlow that is touched, with the versions it was read from.

Not here: what is done with it.
"""
