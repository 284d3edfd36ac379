"""Peak rates and memory of devices, as published by their makers."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One device.

    Attributes:
      flops: dense bfloat16 operations per second.
      memory: bytes.
      bandwidth: bytes per second of its memory.
      links: bytes per second that it sends to other devices over all links together.
      source: of the numbers.
    """

    flops: float
    memory: int
    bandwidth: float
    links: float
    source: str


HARDWARE = {
    'NVIDIA A100': Hardware(312e12, 80 * 10**9, 2.039e12, 300e9, 'https://www.nvidia.com/en-us/data-center/a100/'),
    'NVIDIA H100': Hardware(989e12, 80 * 10**9, 3.35e12, 450e9, 'https://www.nvidia.com/en-us/data-center/h100/'),
    'NVIDIA H200': Hardware(989e12, 141 * 10**9, 4.8e12, 450e9, 'https://www.nvidia.com/en-us/data-center/h200/'),
    'TPU v4': Hardware(275e12, 32 * 2**30, 1.2e12, 300e9, 'https://cloud.google.com/tpu/docs/v4'),
    'TPU v5 lite': Hardware(197e12, 16 * 2**30, 819e9, 200e9, 'https://cloud.google.com/tpu/docs/v5e'),
    'TPU v5': Hardware(459e12, 95 * 2**30, 2.765e12, 600e9, 'https://cloud.google.com/tpu/docs/v5p'),
    'TPU v6 lite': Hardware(918e12, 32 * 2**30, 1.64e12, 448e9, 'https://cloud.google.com/tpu/docs/v6e'),
}
"""By prefix of `jax.Device.device_kind`, longer ones first; for GPUs the SXM versions.

The makers of GPUs give the links both ways together, twice what is sent.
"""


def hardware(kind: str) -> Hardware | None:
    """The hardware of a kind of device; `None` where it is not listed."""
    return next((found for name, found in HARDWARE.items() if kind.startswith(name)), None)
