"""What an operation costs on a device: views, in-place outputs, workspace, FLOPs, bytes, seconds.

Not here: which operations run and when (``judge``). No TensorFlow.
"""
