"""What we write: which paths may be written or replaced, and files and folders that are never half there.

Not here: what is written into them (``plan``, ``saved``).
"""
