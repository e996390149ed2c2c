"""How long a planned step takes on a device: a roofline for every operator and every collective."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from parallel.collective_trace import Collective
from parallel.mesh import AXES
from parallel.module_position import Position
from parallel.step_trace import Work
from tools.plan_depth import PlannedStep
from tools.plan_step import StepSettings
from utils.devices import Device
from utils.flops import mmdit_step_flops

# Seconds a message takes to the next device of a ring, beside its bytes: NVLink and network in NCCL's own model of its
# "simple" protocol (src/graph/tuning.cc, hwLat).
_NVLINK_HOP_S, _NETWORK_HOP_S = 3.4e-6, 14e-6
_WAITED_FOR = ("cp", "tp")  # the network's own collectives; those of FSDP may run beside the arithmetic


@dataclass(frozen=True)
class Shares:
    """What of each roof kernels reach."""

    matmul: float = 1.0
    attention: float | None = None  # None: the device's `attention_share`
    memory: float = 1.0
    network: float = 1.0


ROOFLINE = Shares(attention=1.0)
# Large matrix products on an H100 reach 0.7 to 0.8 of the peak at its sustained clocks, streaming kernels 0.8 to 0.9 of
# the bandwidth, NCCL 0.8 of NVLink.  Assumptions of the plan, not measurements of this repository.
EXPECTED = Shares(matmul=0.7, memory=0.8, network=0.8)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, on every rank alike."""

    compute: float  # operators one after the other
    waited_for: float  # collectives inside the network
    overlappable: float  # collectives of FSDP
    overlapped: float  # the step when FSDP communicates beside the arithmetic
    model_flops: int  # of this rank; recomputation is no progress and does not count
    peak_flops: float

    @property
    def serial(self) -> float:
        """The step without any overlap."""
        return self.compute + self.waited_for + self.overlappable

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation of the overlapped step."""
        return self.model_flops / self.overlapped / self.peak_flops

    @property
    def serial_mfu(self) -> float:
        return self.model_flops / self.serial / self.peak_flops


def step_time(step: PlannedStep, device: Device, shares: Shares, gpus_per_node: int = 8) -> StepTime:
    """Play the step on two queues, arithmetic and FSDP's collectives, each in order.

    A forward block waits for its own gathered weights, which start when the block before starts; the backward pass
    gathers one block ahead and scatters a block's gradients beside the next block.
    """
    parts = {p: _part(step, p, device, shares, gpus_per_node) for p in set(step.sequence())}
    now = links_free = previous_start = gathered = 0.0
    for position in step.sequence():
        compute, waited_for, gathers, reduces = parts[position]
        if position.phase == "forward":
            links_free = max(links_free, previous_start) + gathers
            start = max(now, links_free)
        elif position.phase == "backward":
            start = max(now, gathered)
            gathered = links_free = max(links_free, start) + gathers
        else:  # the optimizer waits for the last gradients
            start = max(now, links_free)
        now, previous_start = start + compute + waited_for, start
        if reduces:
            links_free = max(links_free, now) + reduces
    compute, waited_for, gathers, reduces = (sum(parts[p][i] for p in step.sequence()) for i in range(4))
    settings = step.settings
    flops = mmdit_step_flops(settings.model, settings.img_lens, settings.txt_lens, settings.lora_rank > 0)
    model_flops = flops * settings.accumulate // (settings.cp * settings.tp)
    return StepTime(
        compute, waited_for, gathers + reduces, max(now, links_free), model_flops, _peak(device, settings.dtype)
    )


def _part(
    step: PlannedStep, position: Position, device: Device, shares: Shares, gpus_per_node: int
) -> tuple[float, float, float, float]:
    """Return seconds of arithmetic, of collectives waited for, of gathers and of reductions of FSDP."""
    compute = sum(n * operator_seconds(w, device, shares) for w, n in step.work.get(position, {}).items())
    waited_for = gathers = reduces = 0.0
    for collective, count in step.collectives.get(position, {}).items():
        seconds = count * collective_seconds(collective, device, shares, gpus_per_node)
        axes = group_axes(collective.ranks, step.settings)
        if set(axes) <= set(_WAITED_FOR) or position.phase == "optimizer":
            waited_for += seconds
        elif collective.kind == "all_gather":
            gathers += seconds
        else:
            reduces += seconds
    return compute, waited_for, gathers, reduces


def operator_seconds(work: Work, device: Device, shares: Shares) -> float:
    """Return the longer of an operator's arithmetic and its memory traffic."""
    is_attention = "attn" in work.operator or "attention" in work.operator
    share = shares.matmul
    if is_attention:
        share = shares.attention if shares.attention is not None else device.attention_share
    return max(
        work.flops / (_peak(device, work.dtype) * share), work.traffic / (device.memory_bandwidth * shares.memory)
    )


def collective_seconds(collective: Collective, device: Device, shares: Shares, gpus_per_node: int) -> float:
    """Return the time of a ring over the group's devices.

    Between nodes the ring crosses once for each member that a node has in the group, by that member's network card.
    """
    size = len(collective.ranks)
    if size == 1:
        return 0.0
    num_nodes = len({rank // gpus_per_node for rank in collective.ranks})
    bandwidth, hops = device.nvlink_bandwidth, (size - 1) * _NVLINK_HOP_S
    if num_nodes > 1:
        bandwidth = min(bandwidth, device.network_bandwidth * size / num_nodes)
        hops = (size - num_nodes) * _NVLINK_HOP_S + (num_nodes - 1) * _NETWORK_HOP_S
    rounds = 2 if collective.kind == "all_reduce" else 1  # scatter the sums, then gather them
    return rounds * (collective.num_bytes * (size - 1) / size / (bandwidth * shares.network) + hops)


def group_axes(ranks: Sequence[int], settings: StepSettings) -> tuple[str, ...]:
    """Return the mesh axes along which a group's ranks differ; tp varies fastest."""
    sizes = [getattr(settings, axis) for axis in AXES]
    coordinates = [torch.unravel_index(torch.tensor(rank), sizes) for rank in (ranks[0], ranks[-1])]
    return tuple(axis for axis, first, last in zip(AXES, *coordinates, strict=True) if first != last)


def _peak(device: Device, dtype: torch.dtype) -> float:
    return device.bf16_flops if dtype in (torch.bfloat16, torch.float16) else device.fp32_flops
