"""The command line: its flags, what they may be, and its verbs.

Not here: printing and exit codes (``cli``).
"""
