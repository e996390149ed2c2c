"""The step of train_edit_ddp.py that a plan is about: planner and renderer on one of N ranks, each with whole copies.

DDP keeps a gradient of every trained number from the first step on, in the buckets in which gradients travel; here,
where nothing travels, in one flat tensor a network.  Like the script, a micro-batch runs the planner forward, the
renderer forward and backward, and the planner backward, all under one autocast, which keeps a copy of each float32
weight in the dtype it was used in until the micro-batch ends.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as vlm_module

from model import flow
from model.edit_planner import HIDDEN_LAYERS, Planner, PlannerInput, backward_through_states
from model.layout import PackedLayout
from model.mmdit import MMDiT
from model.mmdit_plan import FSDP_UNITS, LORA_TARGETS, without_gradient
from model.text_encoder import EditTokens, TextEncoder
from model.vision_input import VisionGeometry
from parallel.activation_checkpointing import apply_activation_checkpointing
from parallel.ddp import replicate
from parallel.fake_world import cuda_branches, fake_tensors, fake_world
from parallel.frozen_base import empty_layers, stored_tensors
from parallel.grad_norm import clip_grad_norm
from parallel.lora import apply_lora, compress_base, stored_parameters, trained_parameters
from parallel.memory_trace import Breakdown
from parallel.module_patterns import matching_modules
from parallel.module_position import Position
from parallel.step_trace import StepTrace
from tools.plan_edit_settings import IMAGE, WORD, EditSettings
from tools.plan_step import CUDA_GRANULARITY
from utils.ema import EMA
from utils.optimizer import build_adamw, build_optimizer, build_zero_adamw

NETWORKS = ("planner", "renderer")
_UNITS = (*(f"renderer.{unit}" for unit in FSDP_UNITS), "planner.vlm.model.language_model.layers.*",
          "planner.vlm.model.visual.blocks.*")  # fmt: skip


class _CountedText:
    """Stands for the text encoder: token ids of the right number, without a tokenizer."""

    model_inputs = TextEncoder.model_inputs
    image_pad = IMAGE

    def __init__(self, vlm: nn.Module, settings: EditSettings):
        self.vlm, self.tokenizer = vlm, self
        self.geometry = VisionGeometry.from_config(settings.vlm.vision_config.to_dict())
        self._rows, self._num_answer = {str(i): row for i, row in enumerate(settings.rows)}, settings.num_answer

    def edit_tokens(self, instruction: str, picture_sizes) -> EditTokens:
        return self._rows[instruction]

    def convert_tokens_to_ids(self, token: str) -> int:
        return WORD

    def __call__(self, answer: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [WORD] * self._num_answer}


class EditJob:
    """Networks, optimizers and EMA as sections 2 and 4 of the script make them; nothing has values yet."""

    def __init__(self, settings: EditSettings):
        self.settings, self.networks = settings, nn.ModuleDict()
        with torch.device("meta"):
            vlm = Qwen2_5_VLForConditionalGeneration(settings.vlm) if "planner" in settings.train else None
            renderer = MMDiT(settings.renderer) if "renderer" in settings.train else None
        if vlm is not None:
            self.networks["planner"] = Planner(_CountedText(vlm, settings), settings.freeze_vision)
        if renderer is not None:
            unused, rank = without_gradient(renderer), settings.lora_rank
            if rank:
                apply_lora(renderer, LORA_TARGETS, rank, rank, 0.0, settings.dtype, unused)
                compress_base(renderer, settings.lora_base, FSDP_UNITS, torch.device("cpu"))
            for parameter in unused:
                parameter.requires_grad_(False)
            apply_activation_checkpointing(renderer, FSDP_UNITS, settings.activation_checkpointing)
            self.networks["renderer"] = renderer

    def materialize(self, with_ddp: bool) -> None:
        """Allocate weights, gradients, optimizer states and EMA on the CPU.

        with_ddp: wrap the networks as the script does; else give each a flat gradient, where nothing can travel.
        """
        settings = self.settings
        self.networks.to_empty(device="cpu")
        empty_layers(self.networks)
        stored = {"planner": trained_parameters, "renderer": stored_parameters}
        self.trained = {name: stored[name](network) for name, network in self.networks.items()}
        if settings.optimizer == "muon":
            muon = {"hidden": (*HIDDEN_LAYERS, *FSDP_UNITS), "copies": dist.group.WORLD}
            build = partial(build_optimizer, "muon", **muon)
        else:
            build = build_zero_adamw if settings.zero else build_adamw
        self.optimizers = [build(p.items(), 1e-4, (0.9, 0.99), 1e-8, 0.01) for p in self.trained.values()]
        self.ema = EMA(self.trained["renderer"].items(), 0.998) if "renderer" in self.trained else None
        if with_ddp:
            self.wrapped = {name: replicate(net, 25.0, torch.float32) for name, net in self.networks.items()}
        else:
            self.wrapped = dict(self.networks.items())
            for network in self.networks.values():
                learning = [p for p in network.parameters() if p.requires_grad]
                flat = torch.zeros(sum(p.numel() for p in learning))
                for parameter, part in zip(learning, flat.split([p.numel() for p in learning]), strict=True):
                    parameter.grad = part.view_as(parameter)

    def tensors(self) -> dict[str, list[Tensor]]:
        """Return what this rank holds between steps, by kind."""
        states = [o.optim.state if hasattr(o, "optim") else o.state for o in self.optimizers]
        return {
            "parameters": [*self.networks.parameters(), *stored_tensors(self.networks)],
            "gradients": [p.grad for p in self.networks.parameters() if p.grad is not None],
            "optimizer": [x for state in states for own in state.values() for x in own.values() if torch.is_tensor(x)],
            "EMA": list(self.ema.tensors().values()) if self.ema else [],
        }

    def step(self, trace: StepTrace | None = None) -> dict[str, int]:
        """Run one optimizer step as section 6 of the script does.  Returns bytes by kind, if traced.

        Phases of the planner are those of even micro-batches, of the renderer of odd ones.
        """
        settings, kind = self.settings, "cpu"
        phase = trace.phase if trace else lambda *_: nullcontext()
        adopt = trace.memory.adopt if trace else lambda *_: 0
        for name, tensors in self.tensors().items():
            adopt(name, tensors)
        for i in range(settings.accumulate):
            with ExitStack() as stack:
                if i < settings.accumulate - 1:
                    for module in self.wrapped.values():
                        stack.enter_context(getattr(module, "no_sync", nullcontext)())
                stack.enter_context(torch.autocast(kind, settings.dtype, enabled=settings.dtype != torch.float32))
                output, guides = None, []
                if "planner" in self.wrapped:
                    with phase(2 * i, "forward"):
                        output = self.wrapped["planner"](self._inputs())
                    guides = [states.detach().requires_grad_() for states in output.states]
                if "renderer" in self.wrapped:
                    batch = self._batch(guides)
                    adopt("batch", [x for x in batch if isinstance(x, Tensor)])
                    with phase(2 * i + 1, "forward"):
                        losses = self._losses(*batch)
                    with phase(2 * i + 1, "backward"):
                        losses.sum().backward()
                    del losses, batch
                if output is not None:
                    with phase(2 * i, "backward"):
                        backward_through_states(output.loss_per_sample.sum(), output.states, guides)
                del output, guides
        num_bytes = {name: adopt(name, tensors) for name, tensors in self.tensors().items()}
        with phase(2 * settings.accumulate, "optimizer"):
            for parameters in self.trained.values():
                clip_grad_norm(parameters.values(), 1.0)
            for optimizer in self.optimizers:
                optimizer.step()
            if self.ema:
                self.ema.update(1)
        return num_bytes

    def _inputs(self) -> list[PlannerInput]:
        with unset_fake_temporarily():
            sizes = self.settings.conditions
            pictures = [[torch.zeros(3, *size, dtype=torch.uint8) for size in own] for own in sizes]
        return [PlannerInput(str(i), own, "a plan") for i, own in enumerate(pictures)]

    def _batch(self, guides: list[Tensor]) -> tuple:
        settings = self.settings
        with unset_fake_temporarily():
            layout = PackedLayout.build(settings.grids, settings.text_lens, "cpu")
        num_img = settings.num_image_tokens
        x0, noise = (
            torch.zeros(num_img, settings.renderer.in_channels),
            torch.zeros(num_img, settings.renderer.in_channels),
        )
        txt = torch.zeros(sum(settings.text_lens), settings.renderer.joint_attention_dim, dtype=settings.dtype)
        txt = torch.cat(guides) if guides else txt
        return x0, noise, txt, torch.zeros(len(settings.grids)), layout

    def _losses(self, x0: Tensor, noise: Tensor, txt: Tensor, t: Tensor, layout: PackedLayout) -> Tensor:
        velocity = self.wrapped["renderer"](flow.interpolate(x0, noise, t, layout), txt, t, layout)
        return flow.loss_per_sample(velocity, flow.velocity_target(x0, noise), layout)


@contextmanager
def _indices_with_values(text: _CountedText | None) -> Iterator[None]:
    """Compute token ids, positions and window bounds of the planner for real: shapes depend on their values."""

    def real(function: Callable, convert: Callable = lambda x: x) -> Callable:
        def wrapped(*args, **kwargs):
            with unset_fake_temporarily():
                return convert(function(*args, **kwargs))

        return wrapped

    def bounds(found: object) -> object:
        """Return a result with its bounds as NumPy arrays, on which Python code works where tensors hold no data."""
        if not isinstance(found, tuple):
            return found
        return tuple(x.numpy() if torch.is_tensor(x) and x.dtype == torch.int32 else x for x in found)

    def with_fake_patches(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: x if name != "pixel_values" else torch.zeros(x.shape) for name, x in inputs.items()}

    if text is None:
        yield
        return
    read = real(text.model_inputs)
    with ExitStack() as stack:
        for name in ("get_vision_position_ids", "get_vision_attention_seqlens", "get_vision_window_index"):
            stack.enter_context(patch.object(vlm_module, name, real(getattr(vlm_module, name), bounds)))
        stack.enter_context(
            patch.object(text, "model_inputs", lambda *args: with_fake_patches(read(*args)), create=True)
        )
        stack.enter_context(patch.object(text.vlm.model, "get_rope_index", real(text.vlm.model.get_rope_index)))
        yield


@dataclass(frozen=True)
class EditPlan:
    """One rank's step."""

    settings: EditSettings
    num_bytes: dict[str, int]  # between steps: parameters, gradients, optimizer, EMA
    peaks: dict[Position, Breakdown]

    def peak(self) -> tuple[str, Breakdown]:
        """Return where the most bytes are alive, in words, and what they are."""
        position, breakdown = max(self.peaks.items(), key=lambda item: item[1].total())
        return _place(position), breakdown

    def step_adds(self) -> int:
        """Return the most bytes that the step holds beyond what lies between steps."""
        return self.peak()[1].total() - sum(self.num_bytes.values())

    def kept(self) -> dict[str, int]:
        """Return by network the activations alive as its first backward begins; the renderer's with the planner's."""
        first = {p.micro_batch: b for p, b in self.peaks.items() if p.phase == "backward" and p.stage == "before"}
        return {name: first[i].by_kind()["activations"] for i, name in enumerate(NETWORKS) if i in first}


def _place(position: Position) -> str:
    if position.phase == "optimizer":
        return "optimizer"
    return f"{NETWORKS[position.micro_batch % 2]}, {position.phase}, block {position.stage}"


def make_edit_trace(job: EditJob, granularity: int = 1) -> StepTrace:
    """Return a trace for steps of a job."""
    units = [name for pattern in _UNITS for name, _ in matching_modules(job.networks, pattern)]
    return StepTrace(job.networks, units, (), granularity)


def plan_edit(settings: EditSettings, rank: int = 0) -> EditPlan:
    """Run one step of one rank without a GPU, weights or other processes.

    Raises: ValueError for what the training script refuses too.
    """
    settings = replace(settings, accumulate=min(settings.accumulate, 2))  # the others are like the second
    with fake_world(settings.num_ranks, rank):
        job = EditJob(settings)
        text = job.networks["planner"].text if "planner" in job.networks else None
        trace = make_edit_trace(job, CUDA_GRANULARITY if settings.cuda else 1)
        with fake_tensors(), _indices_with_values(text):
            job.materialize(with_ddp=False)
            with cuda_branches() if settings.cuda else nullcontext(), trace.following():
                num_bytes = job.step(trace)
        return EditPlan(settings, num_bytes, trace.memory.peaks())
