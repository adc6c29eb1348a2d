"""What a kind of device does to costs: allocator granularity, and the two roofs of the roofline model.

Roofline: S. Williams et al., "Roofline", CACM 2009. Only the ratio of times decides a plan, so round figures for a
kind of device serve; they are constants, with where they come from.
"""

from __future__ import annotations

from dataclasses import dataclass

POOL_SHARE = 0.25
"""What TensorFlow's allocator takes on top of the buffers of a step that runs in order, as a share of these.

``BFCAllocator`` (tensorflow/core/common_runtime/bfc_allocator.cc, 2.21) hands out a free chunk whole unless the rest is
at least as large as the request, or 128 MiB: so a buffer takes up to twice its bytes, by chance. The share is from the
largest of twenty steps of ``fit`` of thirteen models on a CPU (docs/figures.md). A GPU has the same allocator.
"""

MOST_POOL_SHARE = 0.5
"""The same where a budget is at stake: what the largest of twenty steps needs in nine of ten cases, about.

Of 25 plans that were measured on a busy machine, half needed 0.25 and nine of ten 0.55 (docs/figures.md).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A kind of device as the cost model sees it.

    ``threads`` run ops at once (0: in the order of the schedule, on an allocator without holes); ops of up to
    ``cheap_seconds`` beyond the launch run on the thread that made them ready (see ``judge.executor``). ``granularity``
    is the allocator's rounding in bytes; buffers from ``pooled_from`` bytes on come from its pool (see
    ``judge.allocator``), which grows by regions if ``pool_grows``. ``pool_share`` is what that pool takes on top of a
    step's buffers as a rule, as a share of these, and ``most_pool_share`` what it takes at most, in nine of ten cases.
    """

    kind: str
    granularity: int
    pooled_from: int
    pool_grows: bool
    pool_share: float
    most_pool_share: float
    threads: int
    cheap_seconds: float
    flops_per_second: float
    bytes_per_second: float
    reduced_bytes_per_second: float
    seconds_per_op: float

    def rounded(self, nbytes: int) -> int:
        """Return ``nbytes`` as the device's allocator counts them."""
        return -(-nbytes // self.granularity) * self.granularity

    def pooled(self, nbytes: int, *, most: bool = False) -> int:
        """Return what a buffer of ``nbytes`` takes, as a rule or at most: with what its pool adds if it has one."""
        share = self.most_pool_share if most else self.pool_share
        return nbytes if nbytes < self.pooled_from else round(nbytes * (1 + share))

    def seconds(self, matrix_flops: int, bytes_moved: int, *, reduces: bool = False) -> float:
        """Return the predicted seconds of one run of an op: what is slower of arithmetic and memory, and the launch.

        ``reduces`` for sums and means, which read slower than other ops.
        """
        if bytes_moved == 0:
            return 0.0
        rate = self.reduced_bytes_per_second if reduces else self.bytes_per_second
        return max(matrix_flops / self.flops_per_second, bytes_moved / rate) + self.seconds_per_op


CPU = Device(
    kind="CPU",
    granularity=64,
    pooled_from=256 << 10,
    pool_grows=True,
    pool_share=POOL_SHARE,
    most_pool_share=MOST_POOL_SHARE,
    threads=2,
    cheap_seconds=3e-6,
    flops_per_second=1.2e11,
    bytes_per_second=2.4e10,
    reduced_bytes_per_second=6e9,
    seconds_per_op=1e-5,
)
"""Two x86 cores with AVX-512: rates of large float32 products, of elementwise ops and of reductions, as the profiles
of training steps of ResNet50, MobileNetV2 and ConvNeXtTiny show them there.

256 KiB is ``MklCPUAllocator``'s ``kSmallAllocationsThreshold``; 3 µs are 8000 cycles
(``kOpIsExpensiveThresholdCycles``).
"""

GPU = Device(
    kind="GPU",
    granularity=256,
    pooled_from=1,
    pool_grows=False,
    pool_share=POOL_SHARE,
    most_pool_share=MOST_POOL_SHARE,
    threads=1,
    cheap_seconds=float("inf"),
    flops_per_second=1.5e13,
    bytes_per_second=7e11,
    reduced_bytes_per_second=7e11,
    seconds_per_op=5e-6,
)
"""A data-centre GPU in float32; 256 bytes is ``BFCAllocator``'s ``kMinAllocationSize``. One
thread launches all kernels, none of which is expensive to launch."""


IDEAL = Device(
    kind="IDEAL",
    granularity=1,
    pooled_from=1,
    pool_grows=False,
    pool_share=0.0,
    most_pool_share=0.0,
    threads=0,
    cheap_seconds=0.0,
    flops_per_second=1.0,
    bytes_per_second=1.0,
    reduced_bytes_per_second=1.0,
    seconds_per_op=0.0,
)
"""Runs ops in the order of the schedule and counts the bytes of tensors, no more: for planners' own arithmetic."""


def device_named(kind: str) -> Device:
    """Return the device model for ``"CPU"``, ``"GPU"`` or ``"IDEAL"``."""
    return {device.kind: device for device in (CPU, GPU, IDEAL)}[kind]
