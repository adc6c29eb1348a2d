"""The one table of options: verbs, ``Request``, the command's flags and all that is said of them come from it.

A new option is one entry in ``table``. Not here: what a verb does with its options. No TensorFlow, so that a bad option
is told at once.
"""

from tf_memsaver.options.checks import Check, choice, number, refused, text, whole
from tf_memsaver.options.table import OPTIONS, checked

__all__ = ["OPTIONS", "Check", "checked", "choice", "number", "refused", "text", "whole"]
