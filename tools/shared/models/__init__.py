"""Keras models: small ones with one trap each, random ones, and real ones for benchmarks."""
