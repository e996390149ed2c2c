"""Meshes and switches worth planning for a number of GPUs, and plans of many at once."""

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import torch

from model.mmdit import MMDiT
from tools.plan_depth import PlannedStep, plan_step
from tools.plan_step import StepSettings

_CHECKPOINTING = ("none", "selective", "full")  # from what keeps most to what keeps least
_STATE_BYTES = 16  # of a parameter on its rank: float32 weight, gradient and two AdamW moments; EMA adds 4


@dataclass(frozen=True)
class Candidate:
    """A step to plan; `step` is None if it cannot fit, or is refused, and `reason` says why."""

    settings: StepSettings
    step: PlannedStep | None = None
    reason: str = ""


def candidates(base: StepSettings, gpus: int, gpus_per_node: int, global_batch_size: int) -> Iterator[StepSettings]:
    """Yield the sensible ways to put a step of `global_batch_size` samples on `gpus` devices.

    Tensor and context parallel ranks stay within a node and divide the heads; a copy of the model (HSDP) spans whole
    nodes.  Those that share the weights widest come first.
    """
    heads = base.model.num_attention_heads
    node = min(gpus, gpus_per_node)
    for tp in _divisors(node):
        for cp in _divisors(node // tp):
            if heads % (tp * cp):
                continue
            data_ranks = gpus // (tp * cp)
            for dp_replicate in _divisors(data_ranks):
                copy = gpus // dp_replicate
                if copy % node or global_batch_size % (data_ranks * len(base.txt_lens)):
                    continue
                for reshard in (True, False):
                    yield replace(
                        base,
                        dp_replicate=dp_replicate,
                        dp_shard=data_ranks // dp_replicate,
                        cp=cp,
                        tp=tp,
                        tp_sequence_parallel=tp > 1,
                        reshard_after_forward=reshard,
                        accumulate=global_batch_size // (data_ranks * len(base.txt_lens)),
                    )


def search(settings: Sequence[StepSettings], limit_bytes: int, num_processes: int) -> list[Candidate]:
    """Plan each of `settings` with the least activation checkpointing that fits in `limit_bytes`."""
    # Forked workers have imported everything already; nothing here has started a thread that they would miss.
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(num_processes, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return list(pool.map(_plan, settings, [limit_bytes] * len(settings)))


def _plan(settings: StepSettings, limit_bytes: int) -> Candidate:
    if (floor := least_bytes(settings)) > limit_bytes:
        return Candidate(settings, None, f"weights and optimizer alone need {floor / 2**30:.0f} GiB")
    for mode in _CHECKPOINTING:
        chosen = replace(settings, activation_checkpointing=mode)
        try:
            step = plan_step(chosen)
        except ValueError as error:
            return Candidate(chosen, None, str(error))
        if step.peak()[1].total() <= limit_bytes:
            return Candidate(chosen, step)
    return Candidate(chosen, step, "does not fit with any activation checkpointing")


def least_bytes(settings: StepSettings) -> int:
    """Return what a rank holds at the end of a backward pass whatever the activations are."""
    with torch.device("meta"):
        parameters = sum(p.numel() for p in MMDiT(settings.model).parameters())
    num_shards = settings.dp_shard * settings.cp * settings.tp
    if settings.lora_rank:  # what is trained is small; a base in fewer bits is not sharded
        return parameters * settings.dtype.itemsize // num_shards if settings.lora_base == "auto" else parameters // 2
    states = parameters * (_STATE_BYTES + 4 * settings.ema) // num_shards
    # Without resharding every gathered weight is there at the end of the forward pass, but no gradient need be.
    gathered = parameters * settings.dtype.itemsize // settings.tp - 4 * parameters // num_shards
    return states + (0 if settings.reshard_after_forward else gathered)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
