"""What a kind of device does to costs: allocator granularity, and the two roofs of the roofline model.

Roofline: S. Williams et al., "Roofline", CACM 2009. Only the ratio of times decides a plan, so round figures for a
kind of device serve; they are constants, with where they come from.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A kind of device as the cost model sees it.

    ``granularity`` is the allocator's rounding in bytes; buffers from ``pooled_from`` bytes on come from its pool (see
    ``allocator``), which grows by regions if ``pool_grows``.
    """

    kind: str
    granularity: int
    pooled_from: int
    pool_grows: bool
    flops_per_second: float
    bytes_per_second: float
    seconds_per_op: float

    def rounded(self, nbytes: int) -> int:
        """Return ``nbytes`` as the device's allocator counts them."""
        return -(-nbytes // self.granularity) * self.granularity

    def seconds(self, matrix_flops: int, bytes_moved: int) -> float:
        """Return the predicted seconds of one run of an op: what is slower of arithmetic and memory, and the launch."""
        if bytes_moved == 0:
            return 0.0
        return max(matrix_flops / self.flops_per_second, bytes_moved / self.bytes_per_second) + self.seconds_per_op


CPU = Device(
    kind="CPU",
    granularity=64,
    pooled_from=256 << 10,
    pool_grows=True,
    flops_per_second=1.2e11,
    bytes_per_second=1.2e10,
    seconds_per_op=1e-5,
)
"""Two x86 cores with AVX-512: rates of large float32 products and of streaming reads, as measured on one.

256 KiB is ``MklCPUAllocator``'s ``kSmallAllocationsThreshold``.
"""

GPU = Device(
    kind="GPU",
    granularity=256,
    pooled_from=1,
    pool_grows=False,
    flops_per_second=1.5e13,
    bytes_per_second=7e11,
    seconds_per_op=5e-6,
)
"""A data-centre GPU in float32; 256 bytes is ``BFCAllocator``'s ``kMinAllocationSize``."""


def device_named(kind: str) -> Device:
    """Return the device model for ``"CPU"`` or ``"GPU"``."""
    return {"CPU": CPU, "GPU": GPU}[kind]
