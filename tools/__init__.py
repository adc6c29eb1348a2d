"""Scripts: tests and checks, the demo, the benchmark."""
