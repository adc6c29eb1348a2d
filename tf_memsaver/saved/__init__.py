"""SavedModels: models exported with their plans, and SavedModels rewritten without their code.

Not here: plan files (``plan``) and Keras files, which Keras writes.
"""
