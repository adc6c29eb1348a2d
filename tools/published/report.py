"""The Markdown of the report: what each table's columns are, and the tables."""

from __future__ import annotations

import json
from typing import Any

from tools.published import batches, costs, cuts

HEAD = """\
The published figures of two papers beside ours (`python -m tools.published`). A target that is missed stands as
it is, with what limits it."""

BATCHES = """\
The largest batch of Checkmate (Jain et al., MLSys 2020) in 16e9 bytes with at most one extra forward pass, under its
own cost model: fp32, a node a layer, a gradient as large as the output, backward twice the forward's cost, fixed memory
twice the parameters (`tools/published/checkmate_graphs.py` has all of it, read from its code). Networks are `VGG19`,
`MobileNet` and `ResNet50` at 224², and `vgg_unet`, `fcn_8` and `segnet` at 416×608 with 19 classes, as its scripts name
them (`tools/published/checkmate_models.py`); Keras 3's MobileNet lacks the padding layer before the first
convolution.

*plain* to *ours* are by our simulator, baselines and ours by bisection over `solve` with the budget and
`max_overhead=1/3`; ours is the better of that and of the memory-time curve made for one example. Our simulator counts a
copy of what enters a replay, as TensorFlow makes it. Checkmate's model has none: **ours, no copies** is the best of the
same plans by its rules, the figure to hold against *Checkmate*, with the share of a forward pass that it replays.
*climb* is what a random local search over segments in segments makes of that plan in 20 000 steps: what it reaches is
in the class of our plans, and only the planners' searches miss it. *bound* is the batch at which the largest working
set of one op fills the device: no schedule goes beyond. *peak at* is the op at the highest point of ours."""

BATCHES_NOTES = """\
All counts of the fixed memory: twice the parameters as in the MILP, and four times as in the script of the baselines,
which takes it off the budget and adds it to the peak. *nothing freed* is Checkmate's "checkpoint all": its schedule
holds every output to the last stage, also when its readers are done. With that and four times the parameters the plain
batches of VGG19 and MobileNet are Checkmate's, rounded down: the models are the same. U-Net's is not (16 would need a
third more memory). Its largest batch is our bound, rounded, so that the network seems the same, and the plain batch
counted in a way that their code does not show.

A log in the notes to their artifact, on VGG19, ends at 289.03459: our bound to the last digit. The batches of U-Net,
FCN8 and SegNet are our bounds, too, when these are rounded to the nearest; 60 and 62 themselves lie above what any
schedule of this model can reach.

Where *climb* is above ours, the class of plans (segments within segments) holds a better one, of three levels, that
`nested` misses. Its recurrence counts what enters a replay, and what is kept for segments before, more often than the
simulator does; so it proposes no plan at all where one level comes near the bound, as on FCN8 and SegNet."""

CUTS = """\
The cuts of training memory of Feng & Huang (CVPR 2021), at their overheads: the step of the keras.applications models,
captured at their batch and image size (`input_sizes` of their repository; InceptionV3 300², and their NASNet is one for
CIFAR-10 that Keras lacks), on this machine's device, through what `search_plan(model, batch_size=…, max_overhead=…)`
does. Their figures are measured in PyTorch on a GPU, whose plain step takes other memory: there is no telling how much.

*plain* is the predicted peak of the plain step, *fixed* what of it no plan touches: weights, the batch, weight
gradients. **cut** is that of the whole peak, *beside fixed* the same bytes as a share of what is not fixed, *tensors
alone* the cut of the whole peak when the holes of TensorFlow's allocator do not count, as they do not in PyTorch's
figures; *at* is the predicted overhead. Their script prints the cut of the whole peak and that of "intermediate
tensors"; which of them the paper shows is not known, but a cut of 81% of ResNet152's whole peak would leave, beside its
weights and their gradients, about two of its largest outputs, and one BatchNorm's gradient takes more. *best cut* is
the largest one when `min_peak` and `nested` are asked, too, within the same overhead: `search_plan` looks at a few
nested plans only, and of plans within 2% of the least peak it takes the quickest. *peak at* is where the best plan
needs most."""

MEASURED = """\
Measured, graph mode, in a process each: batches of 8 at the same image sizes, plans for the same overheads by
`optimize`. *step* is the measured time over the plain step's, of three steps on a machine that does other work
meanwhile: it says little."""

COSTS = """\
What plans cost over the best one known, under Checkmate's cost model: the cost of the whole step, as the geometric mean
over ten budgets between the largest working set of one op and the plain peak (in brackets: at how many a plan was
found; means are over those). Checkmate's table, over its MILP's optimum: articulation-point √n 1.14–1.54, greedy
1.06–1.39, LP rounding 1.00–1.06. *auto* and Chen et al.'s are by our simulator, *no copies* takes all our plans by
Checkmate's rules; greedy takes the cheapest of 60 values of b, as Checkmate does. The best known is the cheapest of all
columns. No schedule costs less than the plain step, so that *auto / plain* is never less than *auto* over optimal; nor
less than *bound*, what the oracle proves where there is one.

What the class of plans costs here: every Grad reads the output of its layer's reader, and a replay makes a segment's
own output again although the next segment keeps it. So a pooling or padding layer, which costs nothing, is not dropped
without a convolution beside it run again; a schedule of single operations does that."""


def markdown(document: dict[str, Any]) -> str:
    """Return the whole report; parts without rows are left out."""
    rows = document["rows"]
    largest, shares, prices = (list(rows[part].values()) for part in ("batches", "cuts", "costs"))
    lines = [HEAD, "", f"Machine: `{json.dumps(document['machine'])}`", ""]
    if largest:
        lines += ["## Largest batches", "", BATCHES, "", *batches.table(largest), ""]
        lines += [BATCHES_NOTES, "", *batches.convention_table(largest), ""]
    if shares:
        lines += ["## Cuts of training memory", "", CUTS, "", *cuts.predicted_table(shares), ""]
    pairs = [
        (rows["measured"][f"{name} plain"], rows["measured"][f"{name} planned"])
        for name in cuts.MEASURED
        if f"{name} planned" in rows["measured"]
    ]
    if pairs:
        lines += [MEASURED, "", *cuts.measured_table(pairs), ""]
    if prices:
        lines += ["## Cost over the best known", "", COSTS, "", *costs.table(prices), ""]
    return "\n".join(lines)
