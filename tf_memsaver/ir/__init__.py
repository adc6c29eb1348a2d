"""The captured training step as plain data: graph, topology and a stable text form."""
