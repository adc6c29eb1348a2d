"""What a person is told and shown: notices, progress, tables.

Not here: what the command does (``command``).
"""
