"""The table of options. Each stands here once, with its type, its check, its default and what is said of it.

A class is a group of options that goes together: a verb takes the keywords of one (``**options: Unpack[PlanOptions]``),
and a sub-command the flags of some. Type checkers and editors read the types here, the program reads the rest.
"""

# No "from __future__ import annotations": the entries of the table are annotations, and are read as values.

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypedDict, get_args

from tf_memsaver.options.checks import (
    MOST_BATCH,
    any_value,
    byte_budget,
    choice,
    either,
    name_,
    none_or,
    share,
    switch,
    whole,
)
from tf_memsaver.options.option import Option, read_float, read_int, several

_Planner = Literal["auto", "min_time", "min_peak", "nested"]
_Baseline = Literal["plain", "recompute_all", "keep_products", "chen_sqrt", "chen_greedy"]
Strategy = Literal[_Planner, _Baseline]
"""The planners of this package; others can be registered."""

STRATEGIES: dict[str, str] = {
    "auto": "the quickest step within the budget; without a budget, the smallest peak within max_overhead",
    "min_time": "the quickest step within the budget",
    "min_peak": "the smallest peak, whatever the time",
    "nested": "segments within segments: a smaller peak than the others reach, for more time",
    "plain": "recomputes nothing (to compare with, as all that follow)",
    "recompute_all": "recomputes every layer that can be",
    "keep_products": "keeps the results of matrix products and convolutions, recomputes all else",
    "chen_sqrt": "about as many segments as the square root of the layers (Chen et al. 2016)",
    "chen_greedy": "segments of about equal bytes (Chen et al. 2016)",
}
"""What each does, as the command's help says it."""

Granularity = Literal["auto", "layer", "op"]
"""What a unit of a graph may be."""

TimeChunks = int | Literal["auto"] | None
"""The time steps of a chunk of a recurrent layer; None leaves it whole."""

Mode = Literal["eager", "graph", "xla"]
"""How TensorFlow runs a step."""

Executor = Literal["auto", "graph", "xla"]
"""What runs a training step: TensorFlow's own executor of graphs, or what XLA compiles."""

MeasureMode = Literal["fit", "eager", "graph", "xla"]
"""How steps are run to be measured."""

DEFAULT_MAX_OVERHEAD = 0.3
"""Without a budget: the smallest peak whose predicted step is at most this share longer."""


# What the verbs take --------------------------------------------------------------------------------------------------


class Data(TypedDict, total=False):
    """What a model is trained on."""

    data: Annotated[
        Any,
        Option(
            check=any_value,
            help="what fit is given: a tf.data.Dataset, a keras.utils.PyDataset, or a batch such as (x, y)",
            more="Specs of a batch will do, too. It tells the batch size and the shapes of inputs and targets. Arrays "
            "of all samples are batched by ``batch_size``, as ``fit`` does it; without that they are one batch. Of a "
            "dataset at most the first element is read. It is remembered for this model.",
            value="MODULE:FUNCTION",
            flag_text="what fit is given: package.module:function, which returns a dataset or a batch",
        ),
    ]


class BatchSize(TypedDict, total=False):
    """What bytes depend on."""

    batch_size: Annotated[
        int | None,
        Option(
            check=none_or(whole(1, MOST_BATCH)),
            help="samples in a training batch (per replica), where data does not tell it or another is meant",
            value="N",
            read=read_int,
        ),
    ]


class Batches(Data, BatchSize):
    """What every verb must be told, in one way or the other."""


class Loops(TypedDict, total=False):
    """How a model is trained, where that is not ``fit``."""

    step: Annotated[
        Any,
        Option(
            check=any_value,
            help="the step of a training loop of your own: the function that is called with each element of ``data``",
            more="It is traced as it stands, optimizer's update and all, and left as it was; the model need not be "
            "compiled. ``model`` is then the network that it calls, or a tuple, list or dict of several.",
        ),
    ]


class Limits(TypedDict, total=False):
    """What a plan must keep to, and who makes it."""

    budget: Annotated[
        int | str | None,
        Option(
            check=none_or(byte_budget),
            help="peak memory allowed to a whole training step, like 6GiB, 512MiB or 16000000000; 80% is a share of "
            "the plain step's, auto what the device has left",
            more="A number counts bytes. None is no limit. Of what a device has left ``auto`` takes nine tenths: "
            "buffers are not all that a process needs.",
            value="BYTES",
        ),
    ]
    max_overhead: Annotated[
        float | None,
        Option(
            check=none_or(share),
            help="longest extra step time allowed, as a share of the plain step (default without a budget: "
            f"{DEFAULT_MAX_OVERHEAD})",
            more="It is held against the predicted time.",
            value="SHARE",
            read=read_float,
        ),
    ]
    strategy: Annotated[
        Strategy | str,
        Option(
            check=name_,
            help=f"planner: {', '.join(get_args(_Planner))}; to compare with: {', '.join(get_args(_Baseline))}; or one "
            "of an installed package",
            more="``auto`` takes the quickest step within the budget or, without one, the smallest peak within "
            "max_overhead (of those within 2% of it, the quickest; nested ones only where more than "
            f"{DEFAULT_MAX_OVERHEAD} is allowed, or a budget needs them).",
            default="auto",
            value="NAME",
            flag_text="who plans: one of the strategies below, or of an installed package",
        ),
    ]


class Hints(TypedDict, total=False):
    """What a planner is told of the model."""

    keep: Annotated[
        str | Sequence[str],
        several(help="layers never to recompute: names or patterns (conv1_*)"),
    ]
    recompute: Annotated[
        str | Sequence[str],
        several(
            help="layers always to recompute",
            more="Names or patterns.",
        ),
    ]
    candidates: Annotated[
        str | Sequence[str],
        several(
            help="cut only after these layers",
            more="Names or patterns: a segment ends after one of them.",
        ),
    ]


class Units(TypedDict, total=False):
    """What a plan is made of."""

    granularity: Annotated[
        Granularity,
        Option(
            check=choice(*get_args(Granularity)),
            help="what is counted and cut: layer; op for single operations, names being theirs then; or auto, which "
            "takes those layers apart where that pays",
            more="A plan of operations may keep a matrix product and recompute the softmax after it. ``auto`` does so "
            "in blocks that somebody put together, and between the layers of a ``call`` of one's own, where "
            "``fit`` runs a graph. Layers of Keras that a model calls one after another stay whole.",
            default="auto",
            value="auto|layer|op",
        ),
    ]
    time_chunks: Annotated[
        TimeChunks,
        Option(
            check=none_or(either(choice("auto"), whole(1), "a whole number of 1 or more, or auto")),
            help="cut recurrent layers along time into chunks of so many steps, which are kept or recomputed by "
            "themselves; auto is the square root of all steps",
            more="Memory then grows with the square root of the steps; results are the same. It is for Keras's "
            "recurrent layers in Functional and Sequential models, which ``auto`` plans by layers then. What stays "
            "whole, the plan's note says with the reason. Each chunk is traced: the first step takes longer.",
            value="STEPS|auto",
            read=read_int,
        ),
    ]


class Timing(TypedDict, total=False):
    """How operations are timed."""

    profile: Annotated[
        bool,
        Option(
            check=switch,
            help="time the step's operations on this device instead of predicting their times",
            more="Each is run by itself (seconds). Predictions go by their arithmetic and the bytes that they move. "
            "Plans from measured times vary a little.",
            default=False,
            value="",
        ),
    ]


class Order(TypedDict, total=False):
    """In which order a step runs."""

    order: Annotated[
        bool,
        Option(
            check=switch,
            help="hold the backward pass in the order that was planned, so that steps take alike",
            more="``False`` leaves the order to TensorFlow's threads. Results are the same. Eager steps and XLA have "
            "an order of their own.",
            default=True,
        ),
    ]


class Running(Order, total=False):
    """How a plan is run."""

    executor: Annotated[
        Executor,
        Option(
            check=choice(*get_args(Executor)),
            help="what runs the steps, and so what judges plans: graph is TensorFlow's own executor, which is "
            "simulated; xla is XLA, whose compiler is asked; auto is what fit will do with the model on this device",
            more="For XLA up to five plans are compiled, none is run; each takes as long as the first step of "
            "``fit``. A model that is not compiled is planned for ``graph``.",
            default="auto",
            value="auto|graph|xla",
        ),
    ]


class Inputs(TypedDict, total=False):
    """What a model is called with."""

    inputs: Annotated[
        Any,
        Option(
            check=any_value,
            help="what a model with a ``call`` of its own is called with, where no data is given: specs such as "
            "``tf.TensorSpec((None, 224, 224, 3))``, or a batch, in the structure of the call's first argument",
            more="It is remembered for this model. A Functional model knows it, but for dimensions that its "
            "``keras.Input`` left open, such as the length of a text.",
        ),
    ]


class Overwrite(TypedDict, total=False):
    """What may become of an output that is there; ``export_saved_model`` takes this alone."""

    overwrite: Annotated[
        bool,
        Option(check=switch, help="replace an output of this program; anything else stays", default=False, value=""),
    ]


class Points(TypedDict, total=False):
    """How close the plans of a curve lie."""

    points: Annotated[
        int,
        Option(
            check=whole(2, 1000),
            help="plans on the curve",
            more="There may be fewer where fewer differ.",
            default=24,
            value="N",
            read=read_int,
        ),
    ]


class RequestOptions(Limits, Hints, Units, Timing, Running):
    """What makes up a ``Request``."""


class PlanOptions(Batches, RequestOptions, Inputs):
    """What the callback ``Optimize`` takes."""


class OptimizeOptions(PlanOptions, Loops):
    """What ``search_plan`` takes."""


class CalibratedOptions(OptimizeOptions, total=False):
    """What ``optimize`` takes."""

    calibrate: Annotated[
        bool,
        Option(
            check=switch,
            help="run twenty real steps, and plan again for less until they keep the budget",
            more="They run in this process, where all that it holds counts, and leave the model as it was. Each plan "
            "is traced for it once more.",
            default=False,
            value="",
        ),
    ]


class ApplyOptions(Loops, total=False):
    """What ``apply_plan`` takes."""

    data: Annotated[
        Any,
        Option(
            check=any_value,
            help="as in ``optimize``: what a ``call`` or a ``train_step`` of the model's own is given, which a plan "
            "from another process does not say; with ``step`` it is needed",
        ),
    ]


class LargestBatchOptions(OptimizeOptions, total=False):
    """What ``max_batch_size`` takes."""

    predict_only: Annotated[
        bool,
        Option(
            check=switch,
            help="run no real steps at the answer",
            more="Else a fresh process runs some and, where they take more than the budget, a smaller batch is tried. "
            "A loop of one's own (``step``) cannot be sent to a process, and is never run.",
            default=False,
            value="",
        ),
    ]


class FunctionOptions(BatchSize, Limits, Hints, Timing, Order):
    """What ``optimize_function`` takes."""


class CaptureOptions(Batches, Units, Timing, Inputs, Loops):
    """What ``trace`` and ``capture_graph`` take."""


class EstimateOptions(Batches, Units, Inputs, Loops):
    """What ``estimate`` takes."""


class PlanOfTraceOptions(Limits, Hints, Running):
    """What ``Trace.plan`` takes."""


class CurveOfTraceOptions(Hints, Points):
    """What ``Trace.curve`` takes."""


class ReportOfTraceOptions(Points, Overwrite):
    """What ``Trace.report`` takes."""


class ReportOptions(OptimizeOptions, Points, Overwrite):
    """What ``report`` takes."""


class CurveOptions(Batches, Hints, Units, Timing, Inputs, Points, Loops):
    """What ``memory_time_curve`` takes."""


class SavedModelOptions(FunctionOptions, Overwrite, total=False):
    """What ``rewrite_saved_model`` takes."""

    functions: Annotated[
        str | Sequence[str],
        several(
            help="functions of a SavedModel to rewrite (default: all that can be trained through)",
            more="Give names, such as ``__call__``.",
            flag="function",
        ),
    ]


class RunOptions(Batches, Loops, total=False):
    """What ``verify`` takes."""

    mode: Annotated[
        Mode,
        Option(
            check=choice(*get_args(Mode)),
            help="how to run the steps: eager, graph or xla",
            more="``graph`` is a tf.function, ``xla`` one with jit_compile.",
            default="graph",
            value="MODE",
        ),
    ]
    steps: Annotated[int, Option(check=whole(1), help="training steps to run", default=3, value="N", read=read_int)]


class MeasureOptions(Batches, Loops, total=False):
    """What ``measure`` takes."""

    mode: Annotated[
        MeasureMode | None,
        Option(
            check=none_or(choice(*get_args(MeasureMode))),
            help="how to run the steps: fit, eager, graph or xla (default: fit for a compiled model, else graph)",
            more="``fit`` is Keras's own, compiled with XLA if it is there; the others are steps of our own: ``graph`` "
            "is a tf.function, ``xla`` one with jit_compile.",
            value="MODE",
        ),
    ]
    steps: Annotated[
        int, Option(check=whole(1), help="training steps to measure", default=20, value="N", read=read_int)
    ]
    beside_plain: Annotated[
        bool,
        Option(
            check=switch,
            help="run steps of the plain model in turns with those of the optimized one, and compare their times",
            more="They run when the memory has been measured. The plain step must fit into the memory that is there.",
            default=False,
        ),
    ]
    isolate: Annotated[
        bool,
        Option(
            check=switch,
            help="measure in a fresh process (the model travels as a ``.keras`` file)",
            more="``False`` measures here, where buffers of other work may be counted. Classes and functions of your "
            "own that are defined in ``__main__`` or inside a function need it, and so do ``Lambda`` layers: the "
            "process loads the file in Keras's safe mode.",
            default=True,
        ),
    ]


# Reading the table ----------------------------------------------------------------------------------------------------


def options_of(group: Any) -> dict[str, Option]:
    """Return the options of a class above, by name."""
    return {name: get_args(entry)[1] for name, entry in group.__annotations__.items()}


def types_of(group: Any) -> dict[str, Any]:
    """Return the types of the options of a class above, by name."""
    return {name: get_args(entry)[0] for name, entry in group.__annotations__.items()}


OPTIONS: dict[str, Option] = {
    name: option
    for group in (MeasureOptions, RunOptions, LargestBatchOptions, CalibratedOptions, CurveOptions, SavedModelOptions)
    for name, option in options_of(group).items()
}
"""The options of all verbs by name. ``measure`` has a ``mode`` and ``steps`` of its own, which are not here."""


def checked(group: Any = None, **options: Any) -> dict[str, Any]:
    """Return options, each by its name, as we use them; ``group`` is the class above that they are of.

    Raises:
      InvalidRequestError: the first one that is no such value; the sentence names it and says what is accepted.
    """
    known = OPTIONS if group is None else options_of(group)
    return {name: known[name].check(name, value) for name, value in options.items()}
