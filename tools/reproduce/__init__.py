"""The headlines of the field, published, predicted and measured: ``tools/reproduce_paper``."""
