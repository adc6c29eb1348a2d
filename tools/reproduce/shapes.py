"""What is reproduced: the sizes of the networks, and what was published of them. No TensorFlow here."""

from __future__ import annotations

SHAPES: dict[str, tuple[int, int, int, int]] = {
    "ResNet-50": (3, 4, 6, 3),
    "ResNet-101": (3, 4, 23, 3),
    "ResNet-200": (3, 24, 36, 3),
    "ResNet-398": (6, 48, 72, 6),
    "ResNet-1001": (15, 120, 183, 15),
}
"""Bottleneck blocks in each stage; three convolutions a block, and the first convolution and the last layer."""

CLASSES = 1000
DEFAULT_OVERHEAD = 0.3
"""The overhead that ``optimize`` allows, and Chen et al.'s."""

GB = 10**9
PAPER_PLAIN_BYTES, PAPER_BYTES = 48 * GB, 7 * GB
"""Chen et al. 2016, figure 5: 1000 layers; without weights and workspace."""

TARGET_BYTES, TARGET_NESTED_BYTES = 4 * GB, 2 * GB
TARGET_OPTIMIZE_SECONDS, TARGET_TRACE_RATIO = 60.0, 1.3
"""Of issue 20, for 1000 layers."""
