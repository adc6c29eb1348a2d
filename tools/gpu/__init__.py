"""Memory of training steps on GPUs that are not there."""
