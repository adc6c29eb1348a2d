"""How many times as long Eigen's kernels take as oneDNN's: ``python -m tools.bench.eigen``.

Prints a line for each type of operation in ``cost/rules.py: BY_EIGEN``: how many times as long it takes without oneDNN,
for several shapes, and in brackets what the table has. Both run in turns, in processes of their own, on an idle
machine; of twelve runs the first quartile counts, of two turns the lesser. A minute on two cores.
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from typing import Any

from absl import app

from tools.shared.processes import in_own_process

_ROUNDS, _RUNS = 2, 12


def _arguments() -> dict[str, list[dict[str, Any]]]:
    """Return what raw operations of each type are given: images, sequences and volumes of usual sizes."""
    import tensorflow as tf

    ones = tf.ones
    image, volume, scores, each = (
        ones((16, 56, 56, 64)),
        ones((4, 16, 32, 32, 32)),
        ones((32, 8, 128, 128)),
        ones((64,)),
    )
    kernels, cube = [ones((3, 3, 64, 64)), ones((1, 1, 64, 64))], ones((3, 3, 3, 32, 32))
    deep = [ones((3, 3, 64, 1)), ones((7, 7, 64, 1))]
    shapes = [((256, 128, 64), (256, 64, 128)), ((256, 128, 128), (256, 128, 64)), ((1024, 32, 32), (1024, 32, 32))]
    plane, space = {"strides": [1] * 4, "padding": "SAME"}, {"strides": [1] * 5, "padding": "SAME"}
    squares = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "SAME"}
    cubes = {"input": volume, "ksize": [1, 2, 2, 2, 1], "strides": [1, 2, 2, 2, 1], "padding": "SAME"}
    image_gradient = {"input_sizes": image.shape, "out_backprop": image, **plane}
    normal = {"x": image, "scale": each, "is_training": True}
    return {
        "AvgPool": [{"value": image, **squares}],
        "AvgPool3D": [cubes],
        "BatchMatMulV2": [{"x": ones(left), "y": ones(right)} for left, right in shapes],
        "Conv2DBackpropInput": [{"filter": kernel, **image_gradient} for kernel in kernels],
        "Conv3D": [{"input": volume, "filter": cube, **space}],
        "Conv3DBackpropFilterV2": [{"input": volume, "filter_sizes": cube.shape, "out_backprop": volume, **space}],
        "Conv3DBackpropInputV2": [{"input_sizes": volume.shape, "filter": cube, "out_backprop": volume, **space}],
        "DepthwiseConv2dNative": [{"input": image, "filter": kernel, **plane} for kernel in deep],
        "DepthwiseConv2dNativeBackpropInput": [{"filter": kernel, **image_gradient} for kernel in deep],
        "FusedBatchNormGradV3": [
            {"y_backprop": image, **dict.fromkeys((f"reserve_space_{number}" for number in (1, 2, 3)), each), **normal}
        ],
        "FusedBatchNormV3": [{"offset": each, "mean": [], "variance": [], **normal}],
        "MaxPool3D": [cubes],
        "Softmax": [{"logits": scores}],
        "Transpose": [{"x": scores, "perm": order} for order in ([0, 1, 3, 2], [0, 2, 3, 1])],
    }


def _milliseconds(_: int) -> dict[str, list[float]]:
    """Return what operations of each type take in this process, the first quartile of some runs."""
    import tensorflow as tf

    def first_quartile(kind: str, arguments: dict[str, Any]) -> float:
        # Inside a function, where graph optimisation puts oneDNN's kernels in place of others.
        function, times = tf.function(functools.partial(getattr(tf.raw_ops, kind), **arguments)), []
        for _ in range(_RUNS):
            begin = time.perf_counter()
            function()
            times.append(1e3 * (time.perf_counter() - begin))
        return statistics.quantiles(times[2:], n=4)[0]

    return {kind: [first_quartile(kind, each) for each in given] for kind, given in _arguments().items()}


def main(_: list[str]) -> None:
    """Print the table."""
    from tf_memsaver.cost.rules import BY_EIGEN

    seen: dict[str, dict[str, list[list[float]]]] = {"0": {}, "1": {}}
    for each in range(_ROUNDS):
        for switch, times in seen.items():
            os.environ["TF_ENABLE_ONEDNN_OPTS"] = switch
            for kind, found in in_own_process(_milliseconds, each).items():
                times.setdefault(kind, []).append(found)
    for kind, eigen in seen["0"].items():
        pairs = zip(zip(*eigen, strict=True), zip(*seen["1"][kind], strict=True), strict=True)
        print(f"{kind:36}", *(f"{min(a) / min(b):5.2f}" for a, b in pairs), f"({BY_EIGEN[kind]})", flush=True)


if __name__ == "__main__":
    app.run(main)
