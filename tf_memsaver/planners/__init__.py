"""The strategies that a user can ask for by name, and ``solve``, which certifies what they propose.

Every module of this folder is loaded with it, so that a planner is one file: its name is entered where it is defined.

Not here: how the search works (``search``). No TensorFlow.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
