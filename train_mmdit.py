"""Train a Qwen-Image-class MMDiT, text-to-image and edits, with flow matching: FSDP2 × tensor parallel, packed.

    ./launch.sh                                                     this machine: all GPUs, or two CPU processes
    torchrun --nproc_per_node=8 train_mmdit.py --model /models/Qwen-Image --data '/data/shards/*.tar'
    torchrun --nnodes=4 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29400 train_mmdit.py --tp 4 ...

The same command again resumes.  To try an idea, copy this file and edit it.
Source: Qwen-Image technical report, arXiv 2508.02324.
"""

import logging
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data.captions import LANGUAGE_ROWS
from data.edit import check_edit_values, token_weights
from data.index import build_index
from data.instructions import trained_wording
from data.labels import group_row, sample_labels
from data.loader import Loader
from data.mixture import load_mixture
from data.plan import BatchPlan, spread_micro_batches
from data.reader import Reader, Sample
from data.shard_cache import open_shard_cache
from data.task_order import build_order
from model import flow, mmdit_plan
from model.encoders import Encoders
from model.latents import token_grid
from model.micro_batch import MicroBatch
from model.mmdit import MMDiT, MMDiTConfig, init_parameter
from model.sampling import SamplerSettings
from parallel.activation_checkpointing import apply_activation_checkpointing
from parallel.checkpoint_resume import resume
from parallel.checkpoint_saver import CheckpointSaver
from parallel.compile import compile_units
from parallel.context_parallel import apply_token_parallel
from parallel.distributed import all_reduce_sum, init_distributed, is_main, shutdown
from parallel.float8 import apply_float8
from parallel.fsdp import gathered, shard_frozen, shard_model
from parallel.grad_norm import clip_grad_norm
from parallel.init_weights import materialize
from parallel.lora import apply_lora, base_record, compress_base, trained_parameters
from parallel.mesh import build_mesh, check_heads, data_parallel, peers, weights_mesh
from parallel.probe import Probe
from parallel.roll_back import skipped_stretches
from parallel.run_guard import RunGuard
from parallel.tensor_parallel import apply_tensor_parallel
from parallel.weights import has_weights
from tools.edit_grid import edit_grid, spread_examples
from tools.sample_grid import sample_grid
from utils.config import parse, run_main, write_run_folder
from utils.ema import EMA
from utils.flops import device_peak, device_scalars, mmdit_step_flops
from utils.logging import RunLog, set_up_logging
from utils.loss_tally import LossTally
from utils.optimizer import OPTIMIZERS, build_optimizer, set_learning_rate
from utils.phase_timer import PhaseTimer
from utils.random_streams import stream_seed, torch_generator
from utils.run_options import MAY_CHANGE, RunOptions, check_options
from utils.run_state import run_tensors
from utils.schedule import learning_rate

log = logging.getLogger("train")


@dataclass(frozen=True)
class Experiment:
    # Model and data
    model: str = "assets/tiny"  # folder in the released layout: transformer/ vae/ text_encoder/ tokenizer/ scheduler/
    from_scratch: bool = False  # ignore weights in the folder's transformer/
    task: str = "t2i"  # t2i, edit (the whole model, as train_edit_ddp.py's renderer) or mixed, in one pack
    task_shares: tuple[str, ...] = ()  # of mixed: t2i=5 edit=4 reconstruction=1; in a mixture file the groups say
    data: str = "emoji-small"  # emoji-small, emoji, emoji-edits, shards (folder, pattern, list.txt; s3://), a mixture
    validation_data: str = ""  # held-out shards, likewise; the emoji sets bring their own
    shuffle_shards: int = 16  # shards whose samples are mixed at a time
    reweight: float = 0.0  # > 0 shifts a mixture's shares to groups of high validation loss: (loss / mean) ** reweight
    run_folder: str = "runs/mmdit"  # everything this run writes; an existing one is resumed
    checkpoint_folder: str = ""  # its checkpoints alone, local or s3://, "" = run_folder/checkpoints
    init_from: str = ""  # run, or one checkpoint of it, whose weights this one begins with
    # Batch and length
    num_steps: int = 1800  # optimizer steps
    global_batch_size: int = 64  # samples an optimizer step, over all ranks
    max_tokens_per_micro_batch: int = 4096  # image and text tokens a rank holds at once: sets the memory
    max_pixels: int = 1328 * 1328  # larger pictures are scaled down to this area, aspect kept
    # Low-rank adapters: what is trained instead of the network
    lora_rank: int = 0  # of each adapter; 0 = none, the network itself is trained
    lora_alpha: float = 0.0  # the adapters' outputs are scaled by alpha / rank; 0 = by 1
    lora_dropout: float = 0.0  # share of the adapters' inputs that is set to zero
    lora_targets: tuple[str, ...] = mmdit_plan.LORA_TARGETS  # name patterns of the layers that get one
    lora_base: str = "auto"  # how the frozen weights under them are kept: auto (as --dtype), bfloat16, int8, nf4
    # Objective
    t_mean: float = 1.2  # logit-normal time, before the resolution shift; the report's pre-training is nearer 0
    t_std: float = 1.5
    caption_dropout: float = 0.1  # share of samples that see the encoded empty prompt
    zh_share: float = 0.5  # probability of the Chinese caption where a sample has both
    num_languages: int = 0  # 3 adds a zero-initialised language embedding (zh, en, other)
    sample_posterior: bool = False  # draw latents from the VAE's posterior rather than take its mode
    # Edits
    reference_pixels: int = 96 * 96  # area at which the network sees each reference; the released models: 1048576
    condition_pixels: int = 96 * 96  # area at which the text encoder sees it; the released models: 147456
    shares: tuple[str, ...] = ()  # with --task edit, of each category, "remove=2 text=1 …"; nothing = all alike
    normalize: float = 0.5  # probability that a loose wording is put into its canonical form
    refused_words: str = ""  # file, one word or phrase a line: samples with them, captions too, are left out
    region_weight: float = 1.0  # of a token inside the edited region against one outside, where a sample has a mask
    # Optimizer
    optimizer: str = "adamw"  # adamw; adamw8bit (torchao): 2 bytes of state a weight; muon: for the blocks' matrices
    lr: float = 4e-3  # peak learning rate
    lr_schedule: str = "cosine"  # after the warm-up: cosine, constant, or wsd: constant, the last 30 % linear
    lr_final: float = 0.05  # where cosine and wsd end, as a share of lr
    warmup_steps: int = 50
    beta1: float = 0.9
    beta2: float = 0.99
    adam_eps: float = 1e-8
    weight_decay: float = 0.01  # not on biases and norms
    max_grad_norm: float = 1.0
    ema_decay: float = 0.998  # rises to this value over the first steps
    # Parallelism: the axes of the device mesh
    dp_replicate: int = 1  # HSDP: copies of the sharded model
    dp_shard: int = -1  # FSDP2 shards; -1 = all ranks that are left
    cp: int = 1  # context parallel: ranks that share out the tokens of the same samples; cp · tp must divide the heads
    tp: int = 1  # tensor parallel: ranks that share out the work on every token
    tp_sequence_parallel: bool = False  # share out the tokens between the tensor-parallel layers, too: less memory
    dtype: str = "auto"  # compute in float32 or bfloat16 (auto: on GPUs); master weights and sums stay float32
    reduce_dtype: str = "float32"  # in which gradients are summed over ranks: float32 or bfloat16
    # Memory and speed: none of these changes what is learned, save for rounding
    activation_checkpointing: str = "none"  # none, full, every_2 (each second block, …), selective (keep products)
    reshard_after_forward: bool = True  # free gathered weights between forward and backward
    num_prefetch: int = 0  # blocks whose weights are gathered ahead; 0 leaves it to FSDP
    cpu_offload: bool = False  # keep weights, gradients and optimizer state in host memory
    shard_text_encoder: bool = False  # gather it a micro-batch at a time: a slice rather than 14 GB on each GPU
    compile: bool = False  # compile each block; micro-batches are filled to one size
    max_text_tokens_per_micro_batch: int = 0  # with --compile: how many are for text; 0 = the data's mean share
    float8: bool = False  # the blocks' matrix products, on H100 and later (torchao)
    # Sample grid
    sample_prompts: tuple[str, ...] = (
        "dog face", "狗脸", "red apple", "红苹果", "pizza", "披萨", "rocket", "火箭", "sunflower", "向日葵",
        "soccer ball", "足球", "automobile", "汽车", "guitar", "吉他",
    )  # fmt: skip
    sample_size: tuple[int, int] = (64, 64)  # height, width in pixels
    seed: int = 0


@dataclass(frozen=True)
class Config(RunOptions, Experiment):
    eval_every: int = 600  # steps between validations; 0 = never
    sample_every: int = 600  # steps between sample grids; 0 = never
    save_every: int = 900  # steps between checkpoints; 0 = never


def make_batch(samples: list[Sample], encoders: Encoders, cfg: Config, stratum: int | None = None) -> MicroBatch:
    """Encode samples and draw their noise and times; stratum: in validation, which of flow.NUM_STRATA times to take.

    Every random number belongs to (seed, epoch, sample, purpose), so it is the same on any cluster shape.
    """
    images, noise, times, weights = [], [], [], []
    for sample in samples:
        epoch, purpose = (sample.plan.epoch, "train") if stratum is None else (0, f"validation {stratum}")
        random = torch_generator(cfg.seed, epoch, sample.key, purpose)
        mean, std = encoders.moments(sample.key, sample.read_pixels, sample.latents)
        normal, eps, posterior = torch.randn((), generator=random), *torch.randn(2, *mean.shape, generator=random)
        target = mean + std * posterior.to(std) if cfg.sample_posterior else mean
        images.append([target, *encoders.references(sample.references_key, sample.references)])
        noise.append(eps)
        times.append(flow.draw_t(normal, grid := token_grid(mean), cfg.t_mean, cfg.t_std, stratum))
        weights.append(token_weights(sample.mask, grid, cfg.region_weight))
    said = [trained_wording(sample, cfg.normalize if stratum is None else 0.0, cfg.seed) for sample in samples]
    with gathered(encoders.text.language_model):
        txt = [encoders.prompt(t, s.states, s.conditions, s.references_key) for t, s in zip(said, samples, strict=True)]
    labels = sample_labels(samples, group_row, encoders.device)
    return MicroBatch.build(images, noise, txt, times, labels, weights if cfg.region_weight != 1.0 else None)


def sample_losses(model: nn.Module, batch: MicroBatch, cfg: Config) -> Tensor:
    """Return the flow-matching loss of each sample, (B,) float32."""
    x_t = flow.interpolate(batch.x0, batch.noise, batch.t, batch.layout)
    velocity = model(x_t, batch.txt, batch.t, batch.layout, batch.language if cfg.num_languages else None)
    return flow.loss_per_sample(velocity, flow.velocity_target(batch.x0, batch.noise), batch.layout, batch.token_weight)


@torch.no_grad()
def validation_losses(
    model: nn.Module, encoders: Encoders, reader: Reader, cfg: Config, micro_batches: list, groups: tuple[str, ...]
) -> dict:
    """Return the mean loss at flow.NUM_STRATA equally likely times: in all, by language, by group and by time."""
    tally = LossTally(LANGUAGE_ROWS, groups, [f"t{stratum}" for stratum in range(flow.NUM_STRATA)])
    for stratum in range(flow.NUM_STRATA):
        for planned in micro_batches:
            batch = make_batch([reader.read(p, encoders.needs_picture) for p in planned], encoders, cfg, stratum)
            losses, at = sample_losses(model, batch, cfg), torch.full_like(batch.group, stratum)
            tally.add(losses, batch.weight, batch.language, batch.group, at)
    return tally.means(all_reduce_sum(tally.sums(), encoders.device), "val_loss")


def main(cfg: Config) -> None:
    # ---- 1. Distributed and mesh ------------------------------------------------------------------------------------
    check_options(cfg, num_languages=(0, 3), optimizer=OPTIMIZERS)
    check_edit_values(cfg)
    device = init_distributed(cfg.timeout_s)
    mesh = build_mesh(device.type, cfg.dp_replicate, cfg.dp_shard, cfg.cp, cfg.tp)
    data_ranks = data_rank, num_data_ranks = data_parallel(mesh)
    num_peers = dist.get_world_size() // num_data_ranks  # ranks that work on the same samples
    dtype = getattr(torch, cfg.dtype if cfg.dtype != "auto" else "bfloat16" if device.type == "cuda" else "float32")
    folder = Path(cfg.run_folder)
    set_up_logging(folder, is_main(), dist.get_rank())

    # ---- 2. Frozen encoders -----------------------------------------------------------------------------------------
    with_vision, memory = cfg.task != "t2i", (cfg.latents_cache_gib, cfg.text_cache_gib)
    encoders = Encoders(cfg.model, device, dtype, *memory, with_vision, load=False)

    # ---- 3. Data ----------------------------------------------------------------------------------------------------
    cache, text, mixture = Path(cfg.cache_folder), encoders.text, load_mixture(cfg.data, cfg.task, cfg.task_shares)
    counted = text.count_tokens, text.counts_id(with_vision), cache, dist.get_rank(), dist.get_world_size()
    shards = mixture.shards("train", cache)  # and the source of each
    val_shards = mixture.held_out(cfg.validation_data, shards, cache)
    index, val_index = (
        build_index(list(paths), *counted, encoders.identity, cfg.condition_pixels if with_vision else None)
        for paths in (shards, val_shards)
    )
    if index.is_encoded() and val_index.is_encoded():
        encoders.keep_only((*cfg.sample_prompts, " ") if cfg.sample_every else ())  # nothing else is ever encoded
    else:
        encoders.load()
    if cfg.shard_text_encoder and encoders.text.has_weights:
        shard_frozen(encoders.text.language_model, weights_mesh(mesh)["dp_shard"])
    mixture.check_reweight(cfg.reweight, cfg.eval_every)
    dealt = [*shards.values()], cfg.shares, cfg.global_batch_size, cfg.seed, cfg.shuffle_shards
    order, sizes = build_order(cfg.task, index, mixture, *dealt), (cfg.max_pixels, cfg.reference_pixels)
    plan = BatchPlan(
        index, order, num_ranks=num_data_ranks, rank=data_rank, max_tokens=cfg.max_tokens_per_micro_batch,
        seed=cfg.seed, caption_dropout=cfg.caption_dropout, zh_share=cfg.zh_share, max_pixels=cfg.max_pixels,
        reference_pixels=cfg.reference_pixels, condition_pixels=cfg.condition_pixels, count_tokens=text.count_tokens,
        num_empty_tokens=text.count_tokens(""), fill=cfg.compile, max_text_tokens=cfg.max_text_tokens_per_micro_batch,
    )  # fmt: skip
    val_micro_batches = spread_micro_batches(
        val_index, cfg.eval_samples, num_data_ranks, data_rank, cfg.max_tokens_per_micro_batch, *sizes,
        lambda *visit: mixture.group_of_record(*visit, [*val_shards.values()]), plan.reconstructing, cfg.task == "edit",
    )  # fmt: skip

    # ---- 4. Model: built without memory, cut, then filled -----------------------------------------------------------
    model_config = MMDiTConfig.from_folder(f"{cfg.model}/transformer", num_languages=cfg.num_languages)
    check_heads(mesh, model_config.num_attention_heads)
    released = None if cfg.from_scratch or not has_weights(f"{cfg.model}/transformer") else f"{cfg.model}/transformer"
    if cfg.lora_rank and (released is None or cfg.num_languages):
        raise ValueError("--lora_rank adapts released weights as they are: --model needs them; no new --num_languages")
    with torch.device("meta"):
        model = MMDiT(model_config)
    num_parameters = sum(p.numel() for p in model.parameters())
    if cfg.float8:
        apply_float8(model, mmdit_plan.FLOAT8_PARTS, device)
    weights, by_rows = weights_mesh(mesh), cfg.tp_sequence_parallel
    tp_plan = mmdit_plan.SEQUENCE_PARALLEL_PLAN if by_rows else mmdit_plan.TENSOR_PARALLEL_PLAN
    apply_tensor_parallel(model, tp_plan, weights["tp"])
    sharers = mesh["cp"], weights["tp"] if by_rows else None
    apply_token_parallel(model, mmdit_plan.shard_inputs, mmdit_plan.ATTENTIONS, *sharers)
    if cfg.lora_rank:
        alpha, skip = cfg.lora_alpha or cfg.lora_rank, mmdit_plan.without_gradient(model)
        apply_lora(model, cfg.lora_targets, cfg.lora_rank, alpha, cfg.lora_dropout, dtype, skip)
        compress_base(model, cfg.lora_base, mmdit_plan.FSDP_UNITS, device)
    apply_activation_checkpointing(model, mmdit_plan.FSDP_UNITS, cfg.activation_checkpointing)
    if cfg.compile:
        compile_units(model, mmdit_plan.FSDP_UNITS)
    shard_model(
        model, mmdit_plan.FSDP_UNITS, weights, dtype, getattr(torch, cfg.reduce_dtype), cfg.reshard_after_forward,
        cfg.num_prefetch, cfg.cpu_offload,
    )  # fmt: skip
    home = torch.device("cpu") if cfg.cpu_offload else device
    materialize(model, home, init_parameter, cfg.seed, released, optional=("language_embed.weight",))

    # ---- 5. Optimizer and EMA ---------------------------------------------------------------------------------------
    trained = trained_parameters(model)
    how = cfg.lr, (cfg.beta1, cfg.beta2), cfg.adam_eps, cfg.weight_decay, mmdit_plan.FSDP_UNITS
    optimizer = build_optimizer(cfg.optimizer, trained.items(), *how)
    ema = EMA(trained.items(), cfg.ema_decay)

    # ---- 6. Resume --------------------------------------------------------------------------------------------------
    tensors, base = run_tensors(trained, ema, optimizer), base_record(model)
    keep = cfg.checkpoint_async, cfg.keep_checkpoints, cfg.keep_every, cfg.keep_best
    saver = CheckpointSaver(cfg.checkpoint_folder or folder / "checkpoints", *keep, asdict(cfg))
    write_run_folder(folder, cfg, __file__, MAY_CHANGE - ({"eval_every", "eval_samples"} if cfg.reweight else set()))
    start_step, state = resume(saver, tensors, base, cfg.model, cfg.init_from, folder)
    if state is not None:
        plan.load_state(state["data"])
    plan.skip(skipped_stretches(folder))
    timer, peak = PhaseTimer(device, cfg), device_peak(device, dtype)
    watched = cfg, timer, saver, Probe(device, cfg.metrics_port and cfg.probe_every)
    run_log = RunLog(folder, cfg.num_steps, start_step, is_main(), dist.get_rank(), *watched)
    reading = cfg.max_pixels, cfg.max_bad_samples, open_shard_cache(cache / "shards", cfg.shard_cache_gib), None
    reading += cfg.reference_pixels, cfg.condition_pixels, cfg.refused_words
    reader, val_reader = (Reader(i, *reading) for i in (index, val_index))
    examples = [val_reader.read(planned) for planned in spread_examples(val_index, cfg.num_examples, *sizes)]
    loader = Loader(reader, plan, start_step, cfg.num_workers, cfg.prefetch_steps, encoders.needs_picture, peers(mesh))
    run_log.monitor.watch(lambda: {"trainer_data_queue_length": loader.num_steps_ahead})
    facts = num_parameters / 1e6, len(index), dist.get_world_size(), mesh, start_step, cfg.num_steps
    log.info("%.2f M parameters, %d training samples, %d ranks (%s), from step %d to %d", *facts)
    guard = RunGuard(folder, saver, cfg, timer, start_step, state)
    # ---- 7. Loop ----------------------------------------------------------------------------------------------------
    for step in range(start_step, cfg.num_steps + 1):
        # Watch before the step: turn 0 sees the untrained model, the last turn only watches.
        timer.begin_step(step)
        ended = step == cfg.num_steps
        if cfg.save_every and step != start_step and guard.saves(step, cfg.num_steps):
            with run_log.saving(step):
                guard.save(step, tensors, {"data": plan.state(step)} | base)
        if guard.stop.reason:
            break
        if cfg.eval_every and (ended or step % cfg.eval_every == 0):
            with timer.phase("validation"), ema.swapped_in(model):
                seen = validation_losses(model, encoders, val_reader, cfg, val_micro_batches, mixture.label_names)
            run_log.scalars(step, seen)
            saver.note_loss(step, seen["val_loss"])
            if cfg.reweight:
                order.reweight(plan.position(step), seen, cfg.reweight)
                loader.seek(step)
        if cfg.sample_every and (ended or step % cfg.sample_every == 0):
            with timer.phase("sampling"), ema.swapped_in(model):
                by = SamplerSettings(cfg.sample_steps, cfg.sample_cfg_scale), cfg.seed, cfg.max_tokens_per_micro_batch
                prompts, name = ((), "samples") if cfg.task == "edit" else (cfg.sample_prompts, "edits")
                drawn = sample_grid(model, encoders, prompts, cfg.sample_size, *by, *data_ranks)
                run_log.image(step, "samples", drawn, prompts)
                drawn = edit_grid(model, encoders, examples, *by, *data_ranks)
                run_log.image(step, name, drawn, [example.caption for example in examples])
        if ended:
            break

        # Batch
        started = time.perf_counter()
        with timer.phase("data_wait"):
            micro_batches = loader.next_step()
        # Loss and backward
        tally, tokens, fillers, flops = LossTally(LANGUAGE_ROWS, mixture.label_names), 0, 0, 0
        for i, samples in enumerate(micro_batches):
            with timer.phase("encode"):
                batch = make_batch(samples, encoders, cfg).filled(plan.fill_to)
            run_log.observe(t=batch.t[: len(samples)], caption_tokens=batch.layout.txt_lens[: len(samples)])
            # Gradients go to the shards at once, so no rank ever holds them whole; only HSDP's copies wait.
            model.set_requires_all_reduce(i == len(micro_batches) - 1)
            if cfg.lora_dropout:
                torch.manual_seed(stream_seed(cfg.seed, step, f"{data_rank} {i}", "dropout"))
            with timer.phase("forward"):
                losses = sample_losses(model, batch, cfg)
            with timer.phase("backward"):
                ((losses * batch.weight).sum() / cfg.global_batch_size).backward()
            flops += mmdit_step_flops(model_config, batch.layout.img_lens, batch.layout.txt_lens, bool(cfg.lora_rank))
            tally.add(losses, batch.weight, batch.language, batch.group)
            fillers += batch.layout.num_filler_tokens
            tokens += batch.num_tokens
        # Clip.  The sums over all ranks make all see the same loss and norm, so all decide alike; peers count alike
        norm = clip_grad_norm(model.parameters(), cfg.max_grad_norm, waiting=timer.phase("communication")).item()
        local = [*tally.sums(), tokens, fillers, flops, len(reader.bad_samples), reader.num_refused, text.num_truncated]
        with timer.phase("communication"):
            totals = guard.stop.agree(all_reduce_sum([*local, *guard.stop.flags()], device))
        *sums, tokens, fillers, flops, bad, refused, cut = (n / num_peers for n in totals)
        loss = (means := tally.means(sums, "loss"))["loss"]
        run_log.check(step, bad, cfg.max_bad_samples)
        takes = guard.takes(step, {"loss": loss}, {"grad_norm": norm}, plan.keys, plan.position)
        # Step
        with timer.phase("optimizer"):
            lr = learning_rate(step, cfg.lr, cfg.num_steps, cfg.warmup_steps, cfg.lr_schedule, cfg.lr_final)
            set_learning_rate(optimizer, lr)
            if takes:
                optimizer.step()
                ema.update(step)
            optimizer.zero_grad()
        # Log
        step_s, phases = time.perf_counter() - started, timer.collect()
        rates = {"samples_per_s": cfg.global_batch_size / step_s, "tokens_per_s": tokens / step_s}
        scalars = means | {"grad_norm": norm, "lr": lr, "samples": (step + 1) * cfg.global_batch_size, "tokens": tokens}
        scalars |= {"step_s": step_s, "bad_samples": bad, "refused": refused, "cut_captions": cut} | phases | rates
        run_log.progress(step + 1, {"loss": loss} | rates, scalars)
        if cfg.log_samples:
            run_log.samples(step, plan.keys(step))
        if cfg.log_every and step % cfg.log_every == 0:
            scalars |= {f"samples_{name}": n for name, n in order.counts(plan.position(step) + 1).items()}
            scalars |= {"filler": fillers / (tokens + fillers)} if cfg.compile else {}
            scalars |= device_scalars(flops / step_s / dist.get_world_size(), peak, device)
            run_log.scalars(step, scalars)

    # ---- 8. Tear-down -----------------------------------------------------------------------------------------------
    guard.close()
    loader.close()
    ask, edit = "--prompt 'dog face' --prompt 狗脸", "--image a.png --instruction 'Make the background pink.'"
    try_it = f"tools.edit --model {folder} {edit}" if cfg.task == "edit" else f"tools.sample --run {folder} {ask}"
    if guard.stop.reason:
        run_log.stop(step, guard.stop.kind)
        run_log.close()
    else:
        run_log.done(saver.path(cfg.num_steps) if cfg.save_every else None, try_it)
    shutdown()


if __name__ == "__main__":
    run_main(main, parse(Config, __doc__))
