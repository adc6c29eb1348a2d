"""The published figures of two papers beside ours: ``python -m tools.published``."""
