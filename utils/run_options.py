"""What every training script takes beside its experiment: how a run is fed, watched and kept."""

import math
from collections.abc import Collection
from dataclasses import dataclass, fields

from utils.config import check_values
from utils.schedule import SCHEDULES

_DTYPES = ("float32", "bfloat16")
_LORA_BASES = ("auto", "bfloat16", "int8", "nf4")
# Numbers, where a configuration has them, that are finite and at least 0; those that are below 1 as well.
_FROM_0 = (
    "lr", "planner_lr", "planner_adamw_share", "lr_final", "warmup_steps", "adam_eps", "weight_decay", "t_std",
    "plan_weight", "reweight", "lora_rank", "lora_alpha", "beta1", "beta2", "lora_dropout", "sample_cfg_scale",
)  # fmt: skip
_BELOW_1 = ("beta1", "beta2", "lora_dropout")


@dataclass(frozen=True)
class RunOptions:
    """Options that do not decide what a run computes; all of them may be others when it is resumed."""

    cache_folder: str = ".cache"  # built data sets and shard indices, shared by runs
    timeout_s: float = 600.0  # a collective that takes longer stops the job
    # Data loading
    num_workers: int = 2  # reader threads a rank; 0 = read in the training thread
    prefetch_steps: int = 2  # optimizer steps read ahead
    latents_cache_gib: float = 1.0  # encoded pictures kept in memory by each rank
    text_cache_gib: float = 0.5  # encoded captions likewise; not while what encodes them is trained
    shard_cache_gib: float = 0.0  # of remote shards, kept in cache_folder by all ranks of a host together; 0 = nothing
    max_bad_samples: int = 100  # unreadable or refused samples replaced before the run gives up
    # Watching; 0 = never
    log_every: int = 10  # steps between lines of metrics.jsonl
    eval_every: int = 500
    eval_samples: int = 64  # validation samples, each at eight times and in each language it has
    sample_every: int = 500
    sample_steps: int = 20  # sampler steps of a picture
    sample_cfg_scale: float = 2.0  # the released pipelines use 4
    num_examples: int = 12  # held-out edits drawn as reference | result | target
    log_samples: bool = False  # list each step's sample keys in samples_seen.jsonl
    metrics_port: int = 0  # Prometheus metrics at this port + LOCAL_RANK; 0 = none
    metrics_host: str = "127.0.0.1"  # address that they are served on
    probe_every: int = 50  # steps between measurements of the ranks' speed and latency, with --metrics_port
    profile_every: int = 1000  # steps between profiled ones, which tell communication from computing; likewise
    wandb: str = ""  # project of Weights & Biases; nothing = none
    # Faults; 0 = never
    hang_s: float = 300.0  # a longer phase of a step (data, forward …) ends the run, to be started again; 0 to debug
    max_hours: float = 0.0  # save and stop so long after the launch
    spike_deviations: float = 10.0  # by so much over the last steps' median, a loss or gradient norm skips its step
    rollback_after: int = 20  # bad steps in a row, after which the run goes back and leaves their data out
    max_rollbacks: int = 3  # before it gives up
    # Checkpoints
    save_every: int = 500
    keep_checkpoints: int = 2  # the newest
    keep_every: int = 0  # and for ever those of steps that this number divides; 0 = none
    keep_best: int = 0  # and so many with the lowest validation loss
    checkpoint_async: str = "none"  # thread, process: copied to memory beside the next step, and written from there


# These too decide how far, on what machines and how closely watched a run goes, not what it computes.
MAY_CHANGE = frozenset(field.name for field in fields(RunOptions)) | {
    "num_steps", "run_folder", "sample_prompts", "sample_size", "max_tokens_per_micro_batch",
    "max_text_tokens_per_micro_batch", "dp_replicate", "dp_shard", "cp", "tp", "tp_sequence_parallel", "num_prefetch",
    "reshard_after_forward", "activation_checkpointing", "cpu_offload", "compile", "shard_text_encoder", "bucket_mb",
    "static_graph", "zero",
}  # fmt: skip


def check_options(config: RunOptions, **choices: Collection) -> None:
    """Raise ValueError for a value that no later check would explain.

    config: of a script: RunOptions and an experiment with the usual names.  choices: what a field of the script's own
    may be, by name.
    """
    counts = "num_steps", "global_batch_size", "max_tokens_per_micro_batch", "eval_samples", "sample_steps"
    usual = {"dtype": ("auto", *_DTYPES), "reduce_dtype": _DTYPES, "lr_schedule": SCHEDULES}
    usual |= {"lora_base": _LORA_BASES}
    check_values(config, counts, usual | choices)
    for name in (field.name for field in fields(RunOptions)):
        if isinstance(value := getattr(config, name), int | float) and value < 0:
            raise ValueError(f"--{name} must not be negative, got {value}")
    for name in _FROM_0:
        value, end = getattr(config, name, 0), 1 if name in _BELOW_1 else math.inf
        if not 0 <= value < end:
            raise ValueError(f"--{name} must be at least 0 and below {end}, got {value}")
    if not config.max_grad_norm > 0:
        raise ValueError(f"--max_grad_norm must be above 0, got {config.max_grad_norm}; inf clips nothing")
    if math.isinf(config.t_mean):
        raise ValueError(f"--t_mean must be finite, got {config.t_mean}")
    if config.metrics_port > 65535:
        raise ValueError(f"--metrics_port must be at most 65535, got {config.metrics_port}")
