"""What one accelerator can do at best; add a row for another one.

Figures are of one device, decimal units, without sparsity.  What a kernel reaches of them is measured, not printed.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """A device and its links to the others of a job."""

    name: str  # a part of what torch.cuda.get_device_name says
    bf16_flops: float  # dense matrix products, FLOP/s
    fp32_flops: float  # without tensor cores, FLOP/s
    memory_gib: float  # what torch.cuda reports as total memory: less than the 80 or 141 "GB" of the label
    memory_bandwidth: float  # bytes/s
    nvlink_bandwidth: float  # bytes/s in one direction, to the other devices of a node together
    network_bandwidth: float  # bytes/s in one direction, this device's share of its node's network cards
    attention_share: float  # of bf16_flops that FlashAttention 2 reaches, the kernel of torch's varlen_attn

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * 2**30)


# Sources.  Peaks, memory and NVLink: NVIDIA's data sheets of H100, H200 (SXM), A100 80 GB (SXM) and HGX B200; NVLink is
# printed for both directions together.  Network: one ConnectX-7 of 400 Gb/s a GPU in DGX H100, H200 and B200, one of
# 200 Gb/s in DGX A100 (their user guides).  Attention: A100 0.73 (FlashAttention 2, arXiv 2307.08691), H100 0.35
# (FlashAttention 3, arXiv 2407.08608, of version 2); H200 has the same cores; for B200, where nothing is published for
# version 2, the H100's absolute rate.  Total memory: as PyTorch prints it on such machines; B200: 180 GB less 1 %.
DEVICES = (
    Device("H200 NVL", 835e12, 60e12, 139.8, 4.8e12, 64e9, 50e9, 0.35),  # cards for PCIe 5.0: no NVLink assumed
    Device("H200", 989e12, 67e12, 139.8, 4.8e12, 450e9, 50e9, 0.35),
    Device("H100 NVL", 835e12, 60e12, 93.1, 3.9e12, 64e9, 50e9, 0.35),
    Device("H100 PCIe", 756e12, 51e12, 79.1, 2.0e12, 64e9, 50e9, 0.35),
    Device("H100", 989e12, 67e12, 79.1, 3.35e12, 450e9, 50e9, 0.35),
    Device("B200", 2250e12, 75e12, 178.0, 8.0e12, 900e9, 50e9, 0.15),
    Device("A100", 312e12, 19.5e12, 79.1, 2.0e12, 300e9, 25e9, 0.73),
)


def find_device(name: str) -> Device | None:
    """Return the first device whose name stands as a word in `name`, or None: a GH200 is no H200."""
    return next((d for d in DEVICES if re.search(rf"\b{re.escape(d.name)}\b", name, re.IGNORECASE)), None)


def device_names() -> str:
    """Return all names, for messages."""
    return ", ".join(device.name for device in DEVICES)
