"""Fine-tune an instruction-edit model: pictures and an instruction → a plan of actions → the new picture.  DDP.

    ./launch.sh train_edit_ddp.py                                   this machine: all GPUs, or two CPU processes
    torchrun --nproc_per_node=8 train_edit_ddp.py --model MODEL --data DATA --lora_rank 32 --optimizer adamw --lr 1e-4

The planner is Qwen2.5-VL: it reads the references and the instruction, and answers with a JSON list of actions.  Its
states of what it read are the text states of the renderer, the MMDiT, which draws the picture beside the references.
The same command again resumes.  Source: Qwen-Image technical report, arXiv 2508.02324; QwenImageEditPlusPipeline.
"""

import contextlib
import logging
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data.balanced_sampler import CategoryBalancedSampler
from data.captions import LANGUAGE_ROWS
from data.edit import CATEGORIES, category_row, check_edit_values, parse_shares, token_weights
from data.index import build_index
from data.instructions import choose_wording
from data.known_plans import check_plans
from data.labels import sample_labels
from data.loader import Loader
from data.mixture import load_mixture
from data.plan import BatchPlan, spread_micro_batches
from data.reader import Reader, Sample
from data.shard_cache import open_shard_cache
from model import flow
from model.edit_planner import HIDDEN_LAYERS, Planner, PlannerInput, PlannerOutput, backward_through_states
from model.encoders import Encoders
from model.latents import token_grid
from model.micro_batch import MicroBatch
from model.mmdit import MMDiT, MMDiTConfig, init_parameter
from model.mmdit_plan import FSDP_UNITS, LORA_TARGETS, without_gradient
from model.sampling import SamplerSettings
from parallel.activation_checkpointing import apply_activation_checkpointing
from parallel.checkpoint_resume import resume
from parallel.checkpoint_saver import CheckpointSaver
from parallel.ddp import accumulating, replicate
from parallel.distributed import all_reduce_sum, init_distributed, is_main, shutdown
from parallel.grad_norm import clip_grad_norm
from parallel.init_weights import materialize
from parallel.lora import apply_lora, base_record, compress_base, stored_parameters, trained_parameters
from parallel.probe import Probe
from parallel.roll_back import skipped_stretches
from parallel.run_guard import RunGuard
from parallel.weights import has_weights
from tools.edit_grid import edit_grid, spread_examples
from utils.config import parse, run_main, write_run_folder
from utils.ema import EMA
from utils.logging import RunLog, set_up_logging
from utils.loss_tally import LossTally
from utils.optimizer import build_optimizer, build_zero_adamw, set_learning_rate
from utils.phase_timer import PhaseTimer
from utils.random_streams import stream_seed, torch_generator, uniform
from utils.run_options import MAY_CHANGE, RunOptions, check_options
from utils.run_state import networks_tensors
from utils.schedule import learning_rate

TRAINABLE = ("planner,renderer", "planner", "renderer")
log = logging.getLogger("train")


@dataclass(frozen=True)
class Experiment:
    # Model and data
    model: str = "assets/tiny"  # folder in the released layout: transformer/ vae/ text_encoder/ tokenizer/ scheduler/
    from_scratch: bool = False  # ignore weights in the folder's transformer/
    train: str = "planner,renderer"  # planner, renderer, or both
    freeze_vision: bool = False  # keep the planner's vision tower: no gradients and optimizer state of it
    data: str = "emoji-edits"  # emoji-edits, shards (folder, pattern or list.txt; s3://, https://), or a mixture
    validation_data: str = ""  # held-out shards, likewise; emoji-edits brings its own
    run_folder: str = "runs/edit"  # everything this run writes; an existing one is resumed
    checkpoint_folder: str = ""  # its checkpoints alone, local or s3://, "" = run_folder/checkpoints
    init_from: str = ""  # run, or one checkpoint of it, whose weights this one begins with
    # Batch and length
    num_steps: int = 780  # optimizer steps
    global_batch_size: int = 32  # samples an optimizer step, over all ranks
    max_tokens_per_micro_batch: int = 8192  # image and text tokens a rank holds at once: sets the memory
    max_pixels: int = 1024 * 1024  # larger targets are scaled down to this area, aspect kept
    reference_pixels: int = 96 * 96  # area at which the renderer sees each reference; the released models: 1048576
    condition_pixels: int = 96 * 96  # area at which the planner sees each reference; the released models: 147456
    # Low-rank adapters: what is trained of the renderer instead of all
    lora_rank: int = 0  # of each adapter; 0 = none
    lora_alpha: float = 0.0  # the adapters' outputs are scaled by alpha / rank; 0 = by 1
    lora_dropout: float = 0.0  # share of the adapters' inputs that is set to zero
    lora_targets: tuple[str, ...] = LORA_TARGETS  # name patterns of the layers that get one
    lora_base: str = "auto"  # how the frozen weights under them are kept: auto (as --dtype), bfloat16, int8, nf4
    # Samples and instructions
    shares: tuple[str, ...] = ()  # share of each category, "remove=2 text=1 …"; nothing = all alike
    normalize: float = 0.5  # probability that a loose wording is put into its canonical form
    refused_words: str = ""  # file, one word or phrase a line: samples with them are left out
    zh_share: float = 0.5  # probability of the Chinese instruction where a sample has both
    instruction_dropout: float = 0.1  # share of samples whose renderer sees the empty instruction
    # Objective
    t_mean: float = 1.2  # logit-normal time, before the resolution shift
    t_std: float = 1.5
    region_weight: float = 1.0  # of a token inside the edited region against one outside, where a sample has a mask
    plan_weight: float = 1.0  # of the planner's cross-entropy a sample
    joint: bool = True  # let the renderer's loss train the planner, too, through the states that guide the renderer
    # Optimizer
    optimizer: str = "muon"  # muon: for the layers' matrices, AdamW for the rest; adamw: for all, which --zero needs
    lr: float = 1.2e-2  # the renderer's peak learning rate
    planner_lr: float = 3e-3
    planner_adamw_share: float = 0.1  # with muon, of planner_lr for what AdamW steps: words' embeddings, biases, norms
    lr_schedule: str = "wsd"  # after the warm-up: cosine, constant, or wsd: constant, the last 30 % linear
    lr_final: float = 0.05  # where cosine and wsd end, as a share of lr
    warmup_steps: int = 50
    beta1: float = 0.9
    beta2: float = 0.99
    adam_eps: float = 1e-8
    weight_decay: float = 0.01  # not on biases and norms
    max_grad_norm: float = 1.0  # of each network
    ema_decay: float = 0.995  # of the renderer; rises to this value over the first steps
    # Parallelism, memory and speed
    dtype: str = "auto"  # compute in float32 or bfloat16 (auto: on GPUs); master weights and sums stay float32
    reduce_dtype: str = "float32"  # in which gradients are summed over ranks: float32 or bfloat16
    bucket_mb: float = 25.0  # gradients that travel together
    static_graph: bool = False  # let DDP learn the order of operations once; only for one micro-batch a step
    zero: bool = False  # share the optimizer's state out over the ranks (ZeRO-1)
    activation_checkpointing: str = "none"  # none, full, every_2 (each second block, …), selective (keep products)
    seed: int = 0


@dataclass(frozen=True)
class Config(RunOptions, Experiment):
    eval_every: int = 390  # steps between validations; 0 = never
    sample_every: int = 780  # steps between sample grids; 0 = never
    save_every: int = 390  # steps between checkpoints; 0 = never


def read_instructions(
    samples: list[Sample], encoders: Encoders, planner: nn.Module | None, cfg: Config, training: bool = True
) -> tuple[list[Tensor], PlannerOutput | None]:
    """Return the text states of each sample, and what the planner makes of it, if it is trained.

    A sample without a known plan, or whose instruction is dropped, has no answer to learn.
    """
    inputs = []
    for sample in samples:
        draw = uniform(cfg.seed, sample.plan.epoch, sample.key, "normalize")
        instruction = choose_wording(sample.caption, cfg.normalize if training else 0.0, draw)
        pictures = [reference.condition for reference in sample.references or ()]
        inputs.append(PlannerInput(instruction, pictures, None if sample.plan.drop_caption else sample.plan_text))
    if planner is None:
        pairs = zip(inputs, samples, strict=True)
        return [encoders.prompt(i.instruction, pictures=i.pictures, key=sample.key) for i, sample in pairs], None
    output = planner(inputs)
    return output.states, output


def edit_labels(samples: list[Sample], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return weight, row of LANGUAGE_ROWS and row of CATEGORIES of samples, (B,) each."""
    return sample_labels(samples, lambda sample: category_row(sample.category), device)


def make_batch(
    samples: list[Sample], states: list[Tensor], encoders: Encoders, cfg: Config, stratum: int | None = None
) -> MicroBatch:
    """Encode the pictures and draw noise and times; stratum: in validation, which of flow.NUM_STRATA times to take.

    Every random number belongs to (seed, epoch, sample, purpose), so it is the same on any number of ranks.
    """
    images, noise, times, weights = [], [], [], []
    for sample in samples:
        epoch, purpose = (sample.plan.epoch, "train") if stratum is None else (0, f"validation {stratum}")
        random = torch_generator(cfg.seed, epoch, sample.key, purpose)
        target, _ = encoders.moments(sample.key, sample.read_pixels)
        pictures = enumerate(reference.vae for reference in sample.references or ())
        images.append([target, *(encoders.reference_latents(f"{sample.key} {i}", pixels) for i, pixels in pictures)])
        normal, eps = torch.randn((), generator=random), torch.randn(target.shape, generator=random)
        noise.append(eps)
        times.append(flow.draw_t(normal, grid := token_grid(target), cfg.t_mean, cfg.t_std, stratum))
        weights.append(token_weights(sample.mask, grid, cfg.region_weight))
    return MicroBatch.build(images, noise, states, times, edit_labels(samples, encoders.device), weights)


def sample_losses(renderer: nn.Module, batch: MicroBatch) -> Tensor:
    """Return the flow-matching loss of each sample's target, (B,) float32."""
    x_t = flow.interpolate(batch.x0, batch.noise, batch.t, batch.layout)
    velocity = renderer(x_t, batch.txt, batch.t, batch.layout)
    return flow.loss_per_sample(velocity, flow.velocity_target(batch.x0, batch.noise), batch.layout, batch.token_weight)


@torch.no_grad()
def validate(networks: dict[str, nn.Module], encoders: Encoders, reader: Reader, cfg: Config, micro_batches: list):
    """Return the renderer's mean loss at flow.NUM_STRATA times, the planner's, and its share of right plans."""
    tallies = {name: LossTally(LANGUAGE_ROWS, CATEGORIES) for name in ("val_loss", "val_plan_loss", "val_plan_exact")}
    for planned in micro_batches:
        samples = [reader.read(p, encoders.needs_picture) for p in planned]
        weights, *rows = edit_labels(samples, encoders.device)
        states, plans = read_instructions(samples, encoders, networks.get("planner"), cfg, training=False)
        for stratum in range(flow.NUM_STRATA if "renderer" in networks else 0):
            batch = make_batch(samples, states, encoders, cfg, stratum)
            tallies["val_loss"].add(sample_losses(networks["renderer"], batch), weights, *rows)
        if plans is not None:
            weights = weights * plans.has_answer
            tallies["val_plan_loss"].add(plans.loss_per_sample, weights, *rows)
            tallies["val_plan_exact"].add(plans.is_exact.float(), weights, *rows)
    sums = {name: all_reduce_sum(tally.sums(), encoders.device) for name, tally in tallies.items()}
    return {k: v for name, tally in tallies.items() for k, v in tally.means(sums[name], name).items()}


def main(cfg: Config) -> None:
    # ---- 1. Distributed ---------------------------------------------------------------------------------------------
    check_options(cfg, train=TRAINABLE, optimizer=("adamw", "muon"))
    check_edit_values(cfg)
    device = init_distributed(cfg.timeout_s)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    dtype = getattr(torch, cfg.dtype if cfg.dtype != "auto" else "bfloat16" if device.type == "cuda" else "float32")
    set_up_logging(folder := Path(cfg.run_folder), is_main(), rank)

    # ---- 2. Frozen VAE, planner, renderer: what is trained keeps float32 master weights ------------------------------
    trains_planner = "planner" in cfg.train
    encoders = Encoders(
        cfg.model, device, dtype, cfg.latents_cache_gib, 0.0 if trains_planner else cfg.text_cache_gib, with_vision=True
    )
    networks: dict[str, nn.Module] = {}
    if trains_planner:
        networks["planner"] = Planner(encoders.text, cfg.freeze_vision)
    if "renderer" in cfg.train:
        transformer = f"{cfg.model}/transformer"
        with torch.device("meta"):
            renderer = MMDiT(MMDiTConfig.from_folder(transformer))
        released = None if cfg.from_scratch or not has_weights(transformer) else transformer
        if cfg.lora_rank and released is None:
            raise ValueError("--lora_rank adapts released weights: --model needs them in transformer/")
        unused, alpha = without_gradient(renderer), cfg.lora_alpha or cfg.lora_rank
        if cfg.lora_rank:
            apply_lora(renderer, cfg.lora_targets, cfg.lora_rank, alpha, cfg.lora_dropout, dtype, unused)
            compress_base(renderer, cfg.lora_base, FSDP_UNITS, device)
        for parameter in unused:  # so that DDP need not look for what gets no gradient
            parameter.requires_grad_(False)
        materialize(renderer, device, init_parameter, cfg.seed, released)
        apply_activation_checkpointing(renderer, FSDP_UNITS, cfg.activation_checkpointing)
        networks["renderer"] = renderer
    how = cfg.bucket_mb, getattr(torch, cfg.reduce_dtype), cfg.static_graph
    wrapped = {name: replicate(net, *how) for name, net in networks.items()}

    # ---- 3. Data ----------------------------------------------------------------------------------------------------
    cache, text, mixture = Path(cfg.cache_folder), encoders.text, load_mixture(cfg.data, "edit").balanced()
    val_shards = mixture.held_out(cfg.validation_data, shards := mixture.shards("train", cache), cache)
    tokens_id, seen_at = f"{text.tokenizer_id} {text.edit_tokenizer_id}", {"condition_pixels": cfg.condition_pixels}
    index, val_index = (
        build_index(list(paths), text.count_tokens, tokens_id, cache, rank, num_ranks, **seen_at)
        for paths in (shards, val_shards)
    )
    balance = parse_shares(cfg.shares), num_ranks, rank, cfg.seed, cfg.global_batch_size
    sampler = CategoryBalancedSampler(index, *balance, edits_only=True)
    sizes = {"max_pixels": cfg.max_pixels, "reference_pixels": cfg.reference_pixels}
    plan = BatchPlan(
        index, sampler, num_ranks=num_ranks, rank=rank, max_tokens=cfg.max_tokens_per_micro_batch, seed=cfg.seed,
        caption_dropout=cfg.instruction_dropout, zh_share=cfg.zh_share, num_empty_tokens=text.count_tokens(""), **sizes,
    )  # fmt: skip
    watched = val_index, cfg.eval_samples, num_ranks, rank, cfg.max_tokens_per_micro_batch
    val_micro_batches = spread_micro_batches(*watched, **sizes, edits_only=True)

    # ---- 4. Optimizers and EMA --------------------------------------------------------------------------------------
    lrs, adamw_shares = {"planner": cfg.planner_lr, "renderer": cfg.lr}, {"planner": cfg.planner_adamw_share}
    muon = {"hidden": (*HIDDEN_LAYERS, *FSDP_UNITS), "copies": dist.group.WORLD}
    trained = {n: (stored_parameters if n == "renderer" else trained_parameters)(net) for n, net in networks.items()}
    build = build_zero_adamw if cfg.zero else partial(build_optimizer, cfg.optimizer, **muon)
    numbers = (cfg.beta1, cfg.beta2), cfg.adam_eps, cfg.weight_decay
    optimizers = {name: build(parameters.items(), lrs[name], *numbers) for name, parameters in trained.items()}
    ema = EMA(trained["renderer"].items(), cfg.ema_decay) if "renderer" in networks else None

    # ---- 5. Resume: copies, the same on all ranks, are stored once; with --zero each rank stores its part ------------
    tensors = networks_tensors(trained, ema, optimizers)
    base = base_record(networks["renderer"]) if ema else {}
    keep = cfg.checkpoint_async, cfg.keep_checkpoints, cfg.keep_every, cfg.keep_best
    saver = CheckpointSaver(cfg.checkpoint_folder or folder / "checkpoints", *keep, asdict(cfg))
    write_run_folder(folder, cfg, __file__, MAY_CHANGE)
    start_step, state = resume(saver, tensors, base, cfg.model, cfg.init_from, folder)
    if state is not None:
        plan.load_state(state["data"])
    plan.skip(skipped_stretches(folder))
    settings, timer = SamplerSettings(cfg.sample_steps, cfg.sample_cfg_scale), PhaseTimer(device, cfg)
    watched = cfg, timer, saver, Probe(device, cfg.metrics_port and cfg.probe_every)
    run_log = RunLog(folder, cfg.num_steps, start_step, is_main(), rank, *watched)
    reading = sizes | seen_at | {"max_bad_samples": cfg.max_bad_samples, "refused_words": cfg.refused_words}
    reading["cache"] = open_shard_cache(cache / "shards", cfg.shard_cache_gib)
    reader, val_reader = (Reader(i, **reading) for i in (index, val_index))
    check_plans(reader, trains_planner, cfg.joint and "renderer" in networks)
    examples = [val_reader.read(planned) for planned in spread_examples(val_index, cfg.num_examples, **sizes)]
    loader = Loader(reader, plan, start_step, cfg.num_workers, cfg.prefetch_steps, encoders.needs_picture)
    run_log.monitor.watch(lambda: {"trainer_data_queue_length": loader.num_steps_ahead})
    sizes_m = ", ".join(f"{n} {sum(p.numel() for p in net.parameters()) / 1e6:.2f} M" for n, net in networks.items())
    log.info("%s, %d edits, %d ranks, from step %d to %d", sizes_m, len(index), num_ranks, start_step, cfg.num_steps)
    guard = RunGuard(folder, saver, cfg, timer, start_step, state)
    # ---- 6. Loop ----------------------------------------------------------------------------------------------------
    for step in range(start_step, cfg.num_steps + 1):
        timer.begin_step(step)
        ended = step == cfg.num_steps
        if cfg.save_every and step != start_step and guard.saves(step, cfg.num_steps):
            with run_log.saving(step):
                guard.save(step, tensors, {"data": plan.state(step)} | base)
        if guard.stop.reason:
            break
        with ema.swapped_in(networks["renderer"]) if ema else contextlib.nullcontext():
            if cfg.eval_every and (ended or step % cfg.eval_every == 0):
                with timer.phase("validation"):
                    seen = validate(networks, encoders, val_reader, cfg, val_micro_batches)
                run_log.scalars(step, seen)
                saver.note_loss(step, seen.get("val_loss", seen.get("val_plan_loss")))
            if ema and cfg.sample_every and (ended or step % cfg.sample_every == 0):
                drawn = encoders, examples, settings, cfg.seed, cfg.max_tokens_per_micro_batch, rank, num_ranks
                with timer.phase("sampling"):
                    picture = edit_grid(networks["renderer"], *drawn)
                run_log.image(step, "samples", picture, [example.caption for example in examples])
        if ended:
            break

        # Batch
        started = time.perf_counter()
        with timer.phase("data_wait"):
            micro_batches = loader.next_step()
        # Loss and backward; gradients travel in the last micro-batch's
        tallies, tokens = {name: LossTally(LANGUAGE_ROWS, CATEGORIES) for name in ("loss", "plan_loss")}, 0
        for i, samples in enumerate(micro_batches):
            weights, *rows = edit_labels(samples, device)
            if cfg.lora_dropout:
                torch.manual_seed(stream_seed(cfg.seed, step, f"{rank} {i}", "dropout"))
            with contextlib.ExitStack() as stack:
                stack.enter_context(accumulating(wrapped.values(), waits=i < len(micro_batches) - 1))
                stack.enter_context(torch.autocast(device.type, dtype, enabled=dtype != torch.float32))
                with timer.phase("planner"):
                    states, plans = read_instructions(samples, encoders, wrapped.get("planner"), cfg)
                guides = [own.detach().requires_grad_(cfg.joint and own.requires_grad) for own in states]
                if ema:
                    with timer.phase("encode"):
                        batch = make_batch(samples, guides, encoders, cfg)
                    run_log.observe(t=batch.t, instruction_tokens=batch.layout.txt_lens)
                    with timer.phase("renderer"):
                        losses = sample_losses(wrapped["renderer"], batch)
                        ((losses @ weights) / cfg.global_batch_size).backward()
                    tallies["loss"].add(losses, weights, *rows)
                    tokens += batch.num_tokens
                if plans is not None:
                    with timer.phase("planner"):
                        answered = weights * plans.has_answer
                        loss = cfg.plan_weight * (plans.loss_per_sample @ answered) / cfg.global_batch_size
                        backward_through_states(loss, states, guides)
                    tallies["plan_loss"].add(plans.loss_per_sample, answered, *rows)
        # Clip.  The sums over all ranks make all see the same losses and norms, so all take the step or none
        most, phase = cfg.max_grad_norm, timer.phase
        norms = {n: clip_grad_norm(p.values(), most, waiting=phase("communication")).item() for n, p in trained.items()}
        local = [number for tally in tallies.values() for number in tally.sums()]
        local += [tokens, len(reader.bad_samples), reader.num_refused, *guard.stop.flags()]
        with timer.phase("communication"):
            *sums, tokens, num_bad, num_refused = guard.stop.agree(all_reduce_sum(local, device))
        means = tallies["loss"].means(sums[: len(sums) // 2], "loss")
        means |= tallies["plan_loss"].means(sums[len(sums) // 2 :], "plan_loss")
        norms = {f"{name}_grad_norm": norm for name, norm in norms.items()}
        run_log.check(step, num_bad, cfg.max_bad_samples)
        losses = {name: means[name] for name in tallies if name in means}
        takes = guard.takes(step, losses, norms, plan.keys, plan.position)
        # Step
        with timer.phase("optimizer"):
            share = learning_rate(step, 1.0, cfg.num_steps, cfg.warmup_steps, cfg.lr_schedule, cfg.lr_final)
            for name, optimizer in optimizers.items():
                set_learning_rate(optimizer, share * lrs[name], adamw_shares.get(name, 1.0))
                if takes:
                    optimizer.step()
                optimizer.zero_grad()
            if ema and takes:
                ema.update(step)
        # Log
        step_s, phases = time.perf_counter() - started, timer.collect()
        rate = {"samples_per_s": cfg.global_batch_size / step_s}
        scalars = {"lr": share * cfg.lr, "samples": (step + 1) * cfg.global_batch_size, "tokens": tokens}
        scalars |= means | norms | phases | rate | {"step_s": step_s, "bad_samples": num_bad}
        run_log.progress(step + 1, losses | rate, scalars)
        if cfg.log_samples:
            run_log.samples(step, plan.keys(step))
        if cfg.log_every and step % cfg.log_every == 0:
            scalars |= {"refused": num_refused, "cut_instructions": text.num_truncated, "tokens_per_s": tokens / step_s}
            scalars |= {"mem_gib": torch.cuda.max_memory_allocated(device) / 2**30} if device.type == "cuda" else {}
            run_log.scalars(step, scalars)

    # ---- 7. Tear-down -----------------------------------------------------------------------------------------------
    guard.close()
    loader.close()
    saved = saver.path(cfg.num_steps) if cfg.save_every else None
    if guard.stop.reason:
        run_log.stop(step, guard.stop.kind)
        run_log.close()
    else:
        edit = f"tools.edit --model {folder} --image a.png --instruction 'Make the background pink.'"
        run_log.done(saved, edit if ema or has_weights(f"{cfg.model}/transformer") else f"tools.report {folder}")
    shutdown()


if __name__ == "__main__":
    run_main(main, parse(Config, __doc__))
