"""What a person is told and shown: notices, progress, tables, the page of a report, plots.

Not here: what the command does (``command``).
"""
