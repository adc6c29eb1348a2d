"""The table of options. It defines each option once: type, check, default and help text.

A class is a group of related options. A verb takes the keywords of one class (``**options: Unpack[PlanOptions]``), and
a sub-command takes the flags of some classes. Type checkers and editors read the types, the program reads the rest.
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
"""The planners of this package. Users can register others."""

STRATEGIES: dict[str, str] = {
    "auto": "the quickest step within the budget; without a budget, about the smallest peak within max_overhead",
    "min_time": "the quickest step within the budget",
    "min_peak": "the smallest peak without nested segments, whatever the time",
    "nested": "segments within segments: a smaller peak than the others reach, for more time",
    "plain": "recomputes nothing (this and the following are baselines for comparison)",
    "recompute_all": "recomputes every layer that can be recomputed",
    "keep_products": "keeps the results of matrix products and convolutions, recomputes all others",
    "chen_sqrt": "about as many segments as the square root of the number of layers (Chen et al. 2016)",
    "chen_greedy": "segments of about equal bytes (Chen et al. 2016)",
}
"""What each strategy does. The command's help shows this text."""

Granularity = Literal["auto", "layer", "op"]
"""What one unit of a plan is: a layer, an operation, or either."""

TimeChunks = int | Literal["auto"] | None
"""The number of time steps in a chunk of a recurrent layer. None does not divide the layer."""

Mode = Literal["eager", "graph", "xla"]
"""How TensorFlow runs a step."""

Executor = Literal["auto", "graph", "xla"]
"""What runs a training step: TensorFlow's own graph executor, or a program that XLA compiles."""

MeasureMode = Literal["fit", "eager", "graph", "xla"]
"""How measured steps are run."""

DEFAULT_MAX_OVERHEAD = 0.3
"""The limit on extra step time if no budget is given, as a share of the plain step's time."""


# What the verbs take --------------------------------------------------------------------------------------------------


class Data(TypedDict, total=False):
    """What a model is trained on."""

    data: Annotated[
        Any,
        Option(
            check=any_value,
            help="your training data, as for fit: a tf.data.Dataset, a keras.utils.PyDataset, or a batch such as "
            "(x, y)",
            more="A batch of specs (``tf.TensorSpec``) works, too. The data gives the batch size and the shapes of "
            "inputs and targets. Arrays of all samples are divided into batches of ``batch_size``, as in ``fit``; "
            "without ``batch_size``, they count as one batch. Of a dataset at most the first 32 "
            "elements are read, and the largest counts. The shapes are remembered for this model.",
            value="MODULE:FUNCTION",
            flag_text="your training data: package.module:function, which returns a dataset or a batch",
        ),
    ]


class BatchSize(TypedDict, total=False):
    """The number of samples in a batch."""

    batch_size: Annotated[
        int | None,
        Option(
            check=none_or(whole(1, MOST_BATCH)),
            help="samples in a training batch (per replica); needed only if data does not give it, or to use another "
            "size",
            value="N",
            read=read_int,
        ),
    ]


class Batches(Data, BatchSize):
    """The data, or the batch size: every verb needs one of them."""


class Loops(TypedDict, total=False):
    """The step of a training loop that does not use ``fit``."""

    step: Annotated[
        Any,
        Option(
            check=any_value,
            help="the step of your own training loop: the function that you call with each element of ``data``",
            more="It is traced as you wrote it, with the optimizer's update, and is not changed. The model need not "
            "be compiled. ``model`` is then the network that the step calls, or a tuple, list or dict of several.",
        ),
    ]


class Limits(TypedDict, total=False):
    """The limits of a plan, and the planner that makes it."""

    budget: Annotated[
        int | str | None,
        Option(
            check=none_or(byte_budget),
            help="most memory that a whole training step may take: 6GiB, 512MiB, or a number of bytes; 80% is a share "
            "of the plain step's peak; auto is the memory that the device has left",
            more="None is no limit. ``auto`` uses nine tenths of the memory that is left, since a process also needs "
            "memory outside its tensors.",
            value="BYTES",
        ),
    ]
    max_overhead: Annotated[
        float | None,
        Option(
            check=none_or(share),
            help="most extra step time allowed, as a share of the plain step's time (default without a budget: "
            f"{DEFAULT_MAX_OVERHEAD})",
            more="It limits the predicted time.",
            value="SHARE",
            read=read_float,
        ),
    ]
    strategy: Annotated[
        Strategy | str,
        Option(
            check=name_,
            help=f"the planner: {', '.join(get_args(_Planner))}; a baseline: {', '.join(get_args(_Baseline))}; or a "
            "planner from an installed package",
            more="``auto`` gives the quickest step within the budget. Without a budget, it gives the smallest peak "
            "within ``max_overhead``; of the plans within 2% of that peak, the quickest. It uses nested segments only "
            f"if ``max_overhead`` is above {DEFAULT_MAX_OVERHEAD} or the budget needs them.",
            default="auto",
            value="NAME",
            flag_text="the planner: one of the strategies below, or one from an installed package",
        ),
    ]


class Hints(TypedDict, total=False):
    """Layers that the plan must keep or recompute."""

    keep: Annotated[
        str | Sequence[str],
        several(help="layers that are never recomputed: names or patterns (conv1_*)"),
    ]
    recompute: Annotated[
        str | Sequence[str],
        several(
            help="layers that are always recomputed: names or patterns",
        ),
    ]
    candidates: Annotated[
        str | Sequence[str],
        several(
            help="the only layers after which a segment may end: names or patterns",
        ),
    ]


class Units(TypedDict, total=False):
    """The units of a plan."""

    granularity: Annotated[
        Granularity,
        Option(
            check=choice(*get_args(Granularity)),
            help="the unit of the plan: layer for whole layers; op for single operations (names are then those of "
            "operations); auto for layers, and for operations inside a layer where that pays",
            more="A plan by operations can keep a matrix product and recompute the softmax after it. ``auto`` does "
            "this inside layers that consist of other layers, and between the layers that a ``call`` of your own "
            "runs, if ``fit`` runs a graph. Keras's own layers that a model calls one after another stay whole.",
            default="auto",
            value="auto|layer|op",
        ),
    ]
    time_chunks: Annotated[
        TimeChunks,
        Option(
            check=none_or(either(choice("auto"), whole(1), "a whole number of 1 or more, or auto")),
            help="divide recurrent layers along time into chunks of this many steps, each kept or recomputed on its "
            "own; auto is the square root of the number of steps",
            more="With ``auto``, memory grows with the square root of the number of steps; results are the same. It "
            "applies to Keras's recurrent layers in Functional and Sequential models, which granularity ``auto`` then "
            "plans by layers. The plan's note lists the layers that were not divided, with the reason. Each chunk is "
            "traced, so the first step takes longer.",
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
            help="measure the times of the step's operations on this device instead of predicting them",
            more="Each operation runs on its own; this takes seconds. Predicted times come from the arithmetic of an "
            "operation and the bytes that it moves. Plans from measured times vary a little from run to run.",
            default=False,
            value="",
        ),
    ]


class Order(TypedDict, total=False):
    """The order in which a step runs."""

    order: Annotated[
        bool,
        Option(
            check=switch,
            help="run the backward pass in the planned order, so that all steps take about the same memory",
            more="``False`` leaves the order to TensorFlow's threads. Results are the same. It has no effect on eager "
            "steps and under XLA.",
            default=True,
        ),
    ]


class Running(Order, total=False):
    """How the steps of a plan run."""

    executor: Annotated[
        Executor,
        Option(
            check=choice(*get_args(Executor)),
            help="what will run the steps; it decides how peaks are computed. graph: TensorFlow's own executor, which "
            "is simulated; xla: XLA, whose compiler reports them; auto: what fit uses for this model on this device",
            more="For XLA, up to five plans are compiled and none is run; each takes as long as the first step of "
            "``fit``. A model without ``compile`` is planned for ``graph``.",
            default="auto",
            value="auto|graph|xla",
        ),
    ]


class Inputs(TypedDict, total=False):
    """The inputs of a model."""

    inputs: Annotated[
        Any,
        Option(
            check=any_value,
            help="the inputs of a model with its own ``call``, if no data is given: specs such as "
            "``tf.TensorSpec((None, 224, 224, 3))``, or a batch, in the structure of the call's first argument",
            more="They are remembered for this model. A Functional model needs them only for dimensions that its "
            "``keras.Input`` leaves open, such as the length of a text.",
        ),
    ]


class Overwrite(TypedDict, total=False):
    """Whether existing output may be replaced. ``export_saved_model`` takes only this."""

    overwrite: Annotated[
        bool,
        Option(
            check=switch,
            help="replace an existing output that tf_memsaver wrote; other files are never replaced",
            default=False,
            value="",
        ),
    ]


class Points(TypedDict, total=False):
    """The number of plans on a curve."""

    points: Annotated[
        int,
        Option(
            check=whole(2, 1000),
            help="number of plans on the curve",
            more="There are fewer if fewer plans differ.",
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
            help="run twenty real steps, and plan again until they keep the budget and use it well",
            more="If the steps take more than the budget, plans for less memory are tried. If they take less than nine "
            "tenths of it, up to three quicker plans are tried, although they are predicted to take more. If all "
            "plans are predicted to take more, the plan of least memory is tried. The steps run in this process. What "
            "it holds besides the model, such as data, does not count, except with ``step=``. The model does not "
            "change. Each plan that is tried is traced once more.",
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
            help="as in ``optimize``; needed with ``step``, and for a model with its own ``call`` or ``train_step`` "
            "if the plan comes from another process",
        ),
    ]


class LargestBatchOptions(OptimizeOptions, total=False):
    """What ``max_batch_size`` takes."""

    predict_only: Annotated[
        bool,
        Option(
            check=switch,
            help="do not check the answer with real steps",
            more="Otherwise, a fresh process runs three steps; if they exceed the budget, a smaller batch is tried. "
            "Your own loop (``step``) cannot be sent to a process, so it is never run.",
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
            help="functions of a SavedModel to rewrite, such as __call__ (default: all that gradients go through)",
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
            more="``graph`` is a tf.function, ``xla`` a tf.function with ``jit_compile=True``.",
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
            more="``fit`` is Keras's own ``fit``, with XLA if Keras uses it. The others run the step of tf_memsaver: "
            "``graph`` in a tf.function, ``xla`` in one with ``jit_compile=True``.",
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
            help="also run plain and optimized steps alternately, and compare their times",
            more="These steps run after memory has been measured. The plain step must fit into memory.",
            default=False,
        ),
    ]
    isolate: Annotated[
        bool,
        Option(
            check=switch,
            help="measure in a fresh process (the model travels as a ``.keras`` file)",
            more="``False`` measures in this process, where other buffers may be counted. So does ``True``, with a "
            "warning, where TensorFlow has reserved all memory of a GPU, as it does by default. You need ``False`` for "
            "classes and functions that are defined in ``__main__`` or inside a function, and for ``Lambda`` layers, "
            "since the process loads the file in Keras's safe mode.",
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
    """Return the checked options by name; ``group`` is the class above that they belong to.

    Raises:
      InvalidRequestError: an option has an invalid value. The message names the option and what is accepted.
    """
    known = OPTIONS if group is None else options_of(group)
    return {name: known[name].check(name, value) for name, value in options.items()}
