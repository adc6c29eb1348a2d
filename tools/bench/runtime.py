"""What ``runtime.recompute`` saves over ``tf.recompute_grad``: measured peaks of one gradient step in graph mode.

Usage: python -m tools.bench.runtime [--output=FILE.md]

A chain of wide dense blocks, each a recompute segment with its weights as arguments, as the rewriting needs it. Each
variant runs in a process of its own. Bytes are the allocator's peak less what was live before the step and less the
gradients of the weights.
"""

from __future__ import annotations

import os
from typing import Any

from absl import app, flags

from tools.shared.processes import in_own_process
from tools.shared.results import RESULTS, write_text

VARIANTS = ("plain", "tf.recompute_grad", "runtime.recompute")
BLOCKS, LAYERS, WIDTH, BATCH = 6, 4, 1024, 1024

_OUTPUT = flags.DEFINE_string("output", str(RESULTS / "runtime.md"), "where to write the table")


def activation_bytes(variant: str) -> int:
    """Return the peak of one gradient step of a variant, without weights and their gradients."""
    import tensorflow as tf

    from tf_memsaver.runtime.recompute import recompute
    from tools.shared.memory import peak_over_live

    generator = tf.random.Generator.from_seed(0)
    weights = [
        [tf.Variable(generator.normal((WIDTH, WIDTH), stddev=0.03)) for _ in range(LAYERS)] for _ in range(BLOCKS)
    ]

    def block(x: Any, *kernels: Any) -> Any:
        for kernel in kernels:
            x = tf.nn.gelu(x @ kernel)
        return x

    class Block:
        forward_first = False

        def first_run(self, inputs: Any, kernels: Any) -> list[Any]:
            return [block(inputs[0], *kernels)]

        def is_loss(self, place: int) -> bool:
            return False

        def may_be_term(self, place: int) -> bool:
            return True

        def is_one_of_several(self, place: int) -> bool:
            return False

        def gradient_name(self, place: int) -> str:
            return f"output_{place}"

        def read_again(self) -> list[Any]:
            return []

        def is_read_elsewhere(self, place: int) -> bool:
            return False

        def is_input_of_others(self, place: int) -> bool:
            return False

        def held(self) -> list[Any]:
            return []

        def replay(self, inputs: Any, kernels: Any, held: Any) -> list[Any]:
            return self.first_run(inputs, kernels)

    def run(x: Any, kernels: list[Any]) -> Any:
        if variant == "plain":
            return block(x, *kernels)
        if variant == "tf.recompute_grad":
            return tf.recompute_grad(block)(x, *kernels)
        return recompute(Block(), [x], kernels)[0]

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            for kernels in weights:
                x = run(x, [tf.convert_to_tensor(kernel) for kernel in kernels])
            loss = tf.reduce_mean(tf.square(x))
        return loss, tape.gradient(loss, [kernel for kernels in weights for kernel in kernels])

    x = generator.normal((BATCH, WIDTH))
    step(x)[0].numpy()
    return peak_over_live(lambda: step(x)[0].numpy()) - BLOCKS * LAYERS * WIDTH * WIDTH * 4


def main(_: list[str]) -> None:
    """Measure all variants and write the table."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from tf_memsaver.compat.versions import versions

    rows = [f"| {name} | {in_own_process(activation_bytes, name) / 2**20:.0f} MiB |" for name in VARIANTS]
    made_with = ", ".join(f"{name} {version}" for name, version in versions())
    text = "\n".join(
        [
            f"Activations of one gradient step, {BLOCKS} segments of {LAYERS} dense layers of {WIDTH}×{WIDTH}, batch "
            f"{BATCH}, weights passed as arguments (`python -m tools.bench.runtime`; CPU, graph mode; {made_with}).",
            "",
            "| segment | peak of activations |",
            "|---|---:|",
            *rows,
            "",
        ]
    )
    write_text(_OUTPUT.value, text)
    print(text)


if __name__ == "__main__":
    app.run(main)
