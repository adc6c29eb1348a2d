"""From a Keras model to a Graph: the model's layer calls in order, and one training step traced over them."""
