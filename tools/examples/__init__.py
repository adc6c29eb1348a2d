"""Runnable scripts of well-known shapes, in our own words and on generated data: what people bring, in small.

Each trains its model with Keras's ``fit``, or in a loop of its own: ``python -m tools.examples.vae``, and in less
memory with ``--memsaver``.
Not here: models that tests are built of (``tools.shared.models``).
"""
