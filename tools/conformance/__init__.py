"""Models trained in every way that people train them, plain and optimized: ``python -m tools.conformance``."""
