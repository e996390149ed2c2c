"""The step that a plan is about: the training script's model, mesh, optimizer and loss, traced on one rank."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from model import flow
from model.layout import PackedLayout
from model.micro_batch import MicroBatch
from model.mmdit import MMDiT, MMDiTConfig
from model.mmdit_plan import (
    ATTENTIONS,
    FSDP_UNITS,
    LORA_TARGETS,
    SEQUENCE_PARALLEL_PLAN,
    TENSOR_PARALLEL_PLAN,
    shard_inputs,
    without_gradient,
)
from parallel.activation_checkpointing import apply_activation_checkpointing
from parallel.context_parallel import apply_token_parallel
from parallel.fake_world import cuda_branches, fake_tensors, fake_world
from parallel.frozen_base import empty_layers, stored_tensors
from parallel.fsdp import shard_model
from parallel.grad_norm import clip_grad_norm
from parallel.lora import apply_lora, compress_base, trained_parameters
from parallel.mesh import build_mesh, weights_mesh
from parallel.module_patterns import matching_modules
from parallel.step_trace import StepTrace, local_tensors
from parallel.tensor_parallel import apply_tensor_parallel
from utils.ema import EMA
from utils.optimizer import build_adamw

PIXELS_PER_TOKEN = 16  # along each side: the VAE's 8 times the patch's 2
CUDA_GRANULARITY = 512  # bytes; PyTorch's caching allocator rounds up to a multiple of it


@dataclass(frozen=True)
class StepSettings:
    """What decides a step's memory, traffic and arithmetic."""

    model: MMDiTConfig = field(default_factory=MMDiTConfig)
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    tp_sequence_parallel: bool = False
    grids: tuple[tuple[tuple[int, int, int], ...], ...] = (((1, 64, 64),),)  # of a micro-batch; see PackedLayout
    txt_lens: tuple[int, ...] = (200,)
    accumulate: int = 1  # micro-batches a step
    dtype: torch.dtype = torch.bfloat16
    reduce_dtype: torch.dtype = torch.float32
    reshard_after_forward: bool = True
    activation_checkpointing: str = "none"
    ema: bool = True
    lora_rank: int = 0
    lora_base: str = "auto"
    cuda: bool = True  # branches and kernels of CUDA rather than of a CPU

    @property
    def num_ranks(self) -> int:
        return self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def img_lens(self) -> list[int]:
        return [sum(f * h * w for f, h, w in images) for images in self.grids]

    @property
    def attention_lens(self) -> list[int]:
        return [i + t for i, t in zip(self.img_lens, self.txt_lens, strict=True)]


class TrainingState:
    """Model, optimizer and EMA as section 4 and 5 of the training script make them; nothing has values yet."""

    def __init__(self, settings: StepSettings, mesh: DeviceMesh):
        self.settings = settings
        with torch.device("meta"):
            self.model = MMDiT(settings.model)
        weights, by_rows, dtype = weights_mesh(mesh), settings.tp_sequence_parallel, settings.dtype
        apply_tensor_parallel(self.model, SEQUENCE_PARALLEL_PLAN if by_rows else TENSOR_PARALLEL_PLAN, weights["tp"])
        apply_token_parallel(self.model, shard_inputs, ATTENTIONS, mesh["cp"], weights["tp"] if by_rows else None)
        if rank := settings.lora_rank:
            apply_lora(self.model, LORA_TARGETS, rank, rank, 0.0, dtype, without_gradient(self.model))
            compress_base(self.model, settings.lora_base, FSDP_UNITS, torch.device("cpu"))
        apply_activation_checkpointing(self.model, FSDP_UNITS, settings.activation_checkpointing)
        shard_model(self.model, FSDP_UNITS, weights, dtype, settings.reduce_dtype, settings.reshard_after_forward)

    def materialize(self, device: torch.device | str) -> None:
        """Allocate parameters, optimizer states and EMA."""
        self.model.to_empty(device=device)
        empty_layers(self.model)
        trained = trained_parameters(self.model)
        self.optimizer = build_adamw(trained.items(), 1e-4, (0.9, 0.99), 1e-8, 0.01)
        self.ema = EMA(trained.items(), 0.998) if self.settings.ema else None

    def tensors(self) -> dict[str, list[Tensor]]:
        """Return what this rank holds between steps, by kind."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return {
            "parameters": local_tensors([*self.model.parameters(), *stored_tensors(self.model)]),
            "optimizer": local_tensors(states),
            "EMA": local_tensors(self.ema.tensors().values()) if self.ema else [],
        }

    def _losses(self, batch: MicroBatch) -> Tensor:
        """Return the loss of each sample, (B,) float32, as the training script's `sample_losses`."""
        x_t = flow.interpolate(batch.x0, batch.noise, batch.t, batch.layout)
        language = batch.language if self.settings.model.num_languages else None
        velocity = self.model(x_t, batch.txt, batch.t, batch.layout, language)
        return flow.loss_per_sample(velocity, flow.velocity_target(batch.x0, batch.noise), batch.layout)

    def gradients(self) -> list[Tensor]:
        """Return this rank's gradients."""
        return local_tensors(p.grad for p in self.model.parameters() if p.grad is not None)

    def step(self, next_batch: Callable[[], MicroBatch], trace: StepTrace | None = None) -> dict[str, int]:
        """Run one optimizer step as section 7 of the training script does.  Returns bytes by kind, if traced."""
        phase = trace.phase if trace else lambda *_: nullcontext()
        adopt = trace.memory.adopt if trace else lambda *_: 0
        for kind, tensors in self.tensors().items():
            adopt(kind, tensors)
        last = self.settings.accumulate - 1
        for i in range(last + 1):
            batch = next_batch()
            adopt("batch", batch.tensors())
            self.model.set_requires_all_reduce(i == last)
            with phase(i, "forward"):
                losses = self._losses(batch) * batch.weight
            with phase(i, "backward"):
                (losses.sum() / len(losses)).backward()
            del losses
        num_bytes = {"gradients": adopt("gradients", self.gradients())}
        if trace:  # once outside of it: DTensor learns what an operator returns by a trial run on whole tensors
            self.optimizer.step()
        with phase(last, "optimizer"):
            clip_grad_norm(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.ema:
                self.ema.update(1)
        # Once more: FSDP's own operators may have been given them.
        return num_bytes | {kind: adopt(kind, tensors) for kind, tensors in self.tensors().items()}


def make_batch(settings: StepSettings, device: torch.device | str = "cpu") -> MicroBatch:
    """Return a micro-batch of the right shapes, all zeros."""
    layout = PackedLayout.build(settings.grids, settings.txt_lens, device)
    num_img, num_txt, num_samples = sum(settings.img_lens), sum(settings.txt_lens), len(settings.txt_lens)
    return MicroBatch(
        layout=layout,
        x0=torch.zeros(num_img, settings.model.in_channels, device=device),
        noise=torch.zeros(num_img, settings.model.in_channels, device=device),
        txt=torch.zeros(num_txt, settings.model.joint_attention_dim, dtype=settings.dtype, device=device),
        t=torch.zeros(num_samples, device=device),
        weight=torch.zeros(num_samples, device=device),
        language=torch.zeros(num_samples, dtype=torch.int64, device=device),
        group=torch.zeros(num_samples, dtype=torch.int64, device=device),
    )


@dataclass(frozen=True)
class TracedStep:
    """What one rank did in a step."""

    settings: StepSettings
    num_bytes: dict[str, int]  # parameters, gradients, optimizer, EMA
    trace: StepTrace


def trace_step(settings: StepSettings, rank: int = 0) -> TracedStep:
    """Run one step of one rank without a GPU, weights or other processes; rank 0 holds the largest shards."""
    with fake_world(settings.num_ranks, rank):
        mesh = build_mesh("cpu", settings.dp_replicate, settings.dp_shard, settings.cp, settings.tp)
        state = TrainingState(settings, mesh)
        fake, batch = fake_tensors(), make_batch(settings)
        granularity = CUDA_GRANULARITY if settings.cuda else 1
        trace = make_trace(state, settings, granularity)
        with fake:
            state.materialize("cpu")
            with cuda_branches() if settings.cuda else nullcontext(), trace.following():
                num_bytes = state.step(lambda: _faked(batch, fake), trace)
        return TracedStep(settings, num_bytes, trace)


def make_trace(state: TrainingState, settings: StepSettings, granularity: int = 1) -> StepTrace:
    """Return a trace for steps of `state`."""
    units = [name for pattern in FSDP_UNITS for name, _ in matching_modules(state.model, pattern)]
    return StepTrace(state.model, units, settings.attention_lens, granularity)


def _faked(value, mode):
    """Return a copy of a batch (or layout) whose tensors are fake."""
    if isinstance(value, Tensor):
        return mode.from_tensor(value)
    if isinstance(value, MicroBatch | PackedLayout):
        return replace(value, **{f.name: _faked(getattr(value, f.name), mode) for f in fields(value)})
    return value
