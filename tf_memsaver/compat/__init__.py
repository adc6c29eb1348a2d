"""Everything private of Keras and of TensorFlow that is touched, with the versions it was read from.

``backend`` and the modules named after Keras are about Keras, the others about TensorFlow. Whatever is changed in
either, so that it asks or tells more than it would, is changed here, and only from the first use on.

Not here: what is done with it.
"""
