"""What a kind of device does to costs: allocator granularity, and the two roofs of the roofline model.

Roofline: S. Williams et al., "Roofline", CACM 2009. Only the ratio of times decides a plan, so round figures for a
kind of device serve; they are constants, with where they come from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

POOL_SHARE = 0.08
"""What is in use beyond a step's chunks, as a share of them: other threads work ahead, and earlier steps left holes.

From the largest of twenty steps of ``fit`` on a CPU (docs/figures.md). A GPU has the same allocator.
"""

LARGEST_REMAINDER = 128 << 20
"""The allocator splits a chunk when more than this would be wasted (``kMaxInternalFragmentation``)."""

LEAST_COUNTED_STEP = 16 << 20
"""Below this, what a CPU's allocator says of a step means nothing, since it does not count buffers below 256 KiB.

Then predictions include these, too.
"""

MOST_OF_RACING = 1.15
"""The most that a step without an order takes, as a share of what is played of it: threads race in it.

The largest of twenty steps of ``fit`` took up to 13% more (MobileNetV2: 216 MiB, 194 played), 17 beside busy processes.
"""

LEAST_OF_PREDICTED = 0.7
"""Steps take at least this share of the predicted peak, in all but 3 of 120 plans (tools/results/bench_budgets.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A kind of device as the cost model sees it.

    ``threads`` run ops at once (0: in the order of the schedule, on an allocator without holes); ops of up to
    ``cheap_seconds`` beyond the launch run on the thread that made them ready (see ``judge.executor``). ``granularity``
    is the allocator's rounding in bytes; buffers from ``pooled_from`` bytes on come from its pool (see
    ``judge.allocator``), and ``get_memory_info`` counts no others. A CPU's pool grows by regions (``pool_grows``), and
    training data comes from it, too. ``pool_share`` of the chunks of a step is in use beyond them.
    """

    kind: str
    granularity: int
    pooled_from: int
    pool_grows: bool
    pool_share: float
    threads: int
    cheap_seconds: float
    flops_per_second: float
    scalar_operations_per_second: float
    bytes_per_second: float
    reduced_bytes_per_second: float
    seconds_per_op: float

    def rounded(self, nbytes: int) -> int:
        """Return ``nbytes`` as the device's allocator counts them."""
        return -(-nbytes // self.granularity) * self.granularity

    def pooled(self, nbytes: npt.NDArray[np.int64], parts: npt.ArrayLike = 1) -> npt.NDArray[np.int64]:
        """Return values' bytes, 0 for those whose buffers, one for each of ``parts``, do not come from the pool."""
        return np.where(nbytes >= self.pooled_from * np.asarray(parts), nbytes, 0)

    def rounded_alone(self, nbytes: int) -> int:
        """Return what counts for a buffer that is larger than all before it.

        Where the pool grows, that is a region of its own, whose size is a power of two. It is handed out whole unless
        ``LARGEST_REMAINDER`` would be wasted.
        """
        region = 1 << max(0, nbytes - 1).bit_length()
        return region if self.pool_grows and region - nbytes < LARGEST_REMAINDER else self.rounded(nbytes)

    def seconds(
        self, bytes_moved: int, matrix_flops: int = 0, scalar_operations: int = 0, *, reduces: bool = False
    ) -> float:
        """Return the predicted seconds of one run of an op: what is slower of arithmetic and memory, and the launch.

        ``scalar_operations`` are done one number at a time. ``reduces`` for sums and means, which read slower than
        other ops.
        """
        if bytes_moved == 0:
            return 0.0
        rate = self.reduced_bytes_per_second if reduces else self.bytes_per_second
        arithmetic = matrix_flops / self.flops_per_second + scalar_operations / self.scalar_operations_per_second
        return max(arithmetic, bytes_moved / rate) + self.seconds_per_op


CPU = Device(
    kind="CPU",
    granularity=64,
    pooled_from=256 << 10,
    pool_grows=True,
    pool_share=POOL_SHARE,
    threads=2,
    cheap_seconds=3e-6,
    flops_per_second=1.2e11,
    scalar_operations_per_second=6e9,
    bytes_per_second=2.4e10,
    reduced_bytes_per_second=6e9,
    seconds_per_op=1e-5,
)
"""Two x86 cores with AVX-512: rates of large float32 products, of elementwise ops and of reductions, as the profiles
of training steps of ResNet50, MobileNetV2 and ConvNeXtTiny show them there. An operation on a single number takes a
cycle.

256 KiB is ``MklCPUAllocator``'s ``kSmallAllocationsThreshold``; 3 µs are 8000 cycles
(``kOpIsExpensiveThresholdCycles``).
"""

CPU_BFC = replace(CPU, kind="CPU_BFC", pooled_from=1)
"""The same with the allocator that GPUs have, which counts all buffers (``compat/counting.py``)."""

GPU = Device(
    kind="GPU",
    granularity=256,
    pooled_from=1,
    pool_grows=False,
    pool_share=POOL_SHARE,
    threads=1,
    cheap_seconds=float("inf"),
    flops_per_second=1.5e13,
    scalar_operations_per_second=1.5e13,
    bytes_per_second=7e11,
    reduced_bytes_per_second=7e11,
    seconds_per_op=5e-6,
)
"""A data-centre GPU in float32, whose kernels compute all numbers of elementwise ops side by side. 256 bytes is
``BFCAllocator``'s ``kMinAllocationSize``. One thread launches all kernels, none of which is expensive to launch."""


IDEAL = Device(
    kind="IDEAL",
    granularity=1,
    pooled_from=1,
    pool_grows=False,
    pool_share=0.0,
    threads=0,
    cheap_seconds=0.0,
    flops_per_second=1.0,
    scalar_operations_per_second=1.0,
    bytes_per_second=1.0,
    reduced_bytes_per_second=1.0,
    seconds_per_op=0.0,
)
"""Runs ops in the order of the schedule and counts the bytes of tensors, no more: for planners' own arithmetic."""


def device_named(kind: str) -> Device:
    """Return the device model for ``"CPU"``, ``"CPU_BFC"``, ``"GPU"`` or ``"IDEAL"``."""
    return {device.kind: device for device in (CPU, CPU_BFC, GPU, IDEAL)}[kind]


def processor(kind: str) -> str:
    """Return what people call a kind of device, ``"CPU"`` or ``"GPU"``: its allocator is not their concern."""
    return kind.partition("_")[0]
