"""What was promised, tried: a training step of a model, its peak and time (``measure``), its results (``verify``).

Not here: what is predicted (``judge``).
"""
