"""The second part of the table: options that only the command takes."""

# No "from __future__ import annotations": the entries of the table are annotations, and are read as values.

from collections.abc import Sequence
from typing import Annotated, Literal, TypedDict, get_args

from tf_memsaver.options.checks import choice, choices, name_, path, sizes, switch
from tf_memsaver.options.option import Option, read_ints, read_list
from tf_memsaver.options.table import Batches

Format = Literal["text", "json"]
"""What the command prints."""

SaveFormat = Literal["keras", "saved_model"]
"""The formats in which it writes a model."""


class FormatFlags(TypedDict, total=False):
    """What the command prints."""

    format: Annotated[
        Format,
        Option(
            check=choice(*get_args(Format)),
            help="output format: tables, or one JSON document",
            default="text",
            value="text|json",
        ),
    ]


class ModelFlags(Batches, FormatFlags, total=False):
    """How the command makes a model, and what it prints."""

    input_shape: Annotated[
        Sequence[int],
        Option(
            check=sizes,
            help="shape of one example, if MODEL is a name of keras.applications",
            default=(),
            value="H,W,C",
            read=read_ints,
        ),
    ]
    optimizer: Annotated[
        str,
        Option(check=name_, help="compile the model with this optimizer, so that its slots count", value="NAME"),
    ]
    loss: Annotated[str, Option(check=name_, help="compile the model with this loss", value="NAME")]


class DetailFlags(TypedDict, total=False):
    """How much the command shows."""

    all: Annotated[
        bool,
        Option(
            check=switch,
            help="show every layer and segment instead of the largest blocks",
            default=False,
            value="",
        ),
    ]


class PlanFlags(TypedDict, total=False):
    """An existing plan."""

    plan: Annotated[str, Option(check=path, help="apply this plan file instead of planning", value="FILE")]


class OutputFlags(TypedDict, total=False):
    """Where the command writes."""

    output: Annotated[
        str,
        Option(
            check=path,
            help="file or folder to write; it must not exist, unless --overwrite is given",
            value="PATH",
        ),
    ]


class SaveFlags(TypedDict, total=False):
    """What the command writes of a model."""

    save_format: Annotated[
        Sequence[SaveFormat],
        Option(
            check=choices(*get_args(SaveFormat)),
            help="formats of the model, written beside plan.json: keras, saved_model (default: both)",
            default=get_args(SaveFormat),
            value="NAME,NAME",
            read=read_list,
        ),
    ]
