"""Adapters on a base in fewer bits: what they learn is what they learn on the same base written out by hand."""

import sys
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from diffusers import QwenImagePipeline
from torch import nn

import train_mmdit
from model.mmdit import MMDiT, MMDiTConfig
from model.mmdit_plan import FSDP_UNITS, LORA_TARGETS, without_gradient
from parallel.activation_checkpointing import apply_activation_checkpointing
from parallel.compile import compile_units
from parallel.ddp import replicate
from parallel.fingerprint import fingerprint
from parallel.frozen_base import FORMATS, FrozenLinear, compressed_layers, linear_weights, narrowed, widened
from parallel.fsdp import shard_model
from parallel.init_weights import materialize
from parallel.lora import apply_lora, base_record, compress_base, trained_parameters
from parallel.mesh import build_mesh, weights_mesh
from parallel.module_patterns import matching_modules
from parallel.slices import local_slice
from parallel.tensor_parallel import apply_tensor_parallel
from parallel.weights import read_safetensors
from tests.released_folder import TINY, make_released
from tests.spawn import run_ranks
from tests.test_lora_export import PROMPTS, SETTINGS, draw, picture
from tests.test_lora_parallel import add_update, init_factor
from tests.test_parallel_parity import CONFIG, FILL_TO, SAMPLES, full, init, losses
from tests.test_train_edit import folder as folder  # noqa: PLC0414  (a fixture: shards of edits)
from tests.test_train_edit import lines, state, train
from tools import export, export_lora, sample

CPU = torch.device("cpu")
RANK, ALPHA = 3, 4.5  # those of `add_update`
# The 16 values of NF4 (QLoRA, appendix E) to the four digits that torchao keeps.
NF4 = (-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0, 0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626,
       0.7230, 1.0)  # fmt: skip


def by_hand(weight: torch.Tensor, kept_as: str) -> torch.Tensor:
    """Return what is left of a weight in fewer bits, in float32; written with NumPy."""
    w = weight.numpy().astype(np.float32)
    if kept_as == "bfloat16":
        bits = w.view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return torch.from_numpy(rounded.astype(np.uint32).view(np.float32))
    if kept_as == "int8":
        scale = (np.abs(w).max(axis=1, keepdims=True) / np.float32(127.5)).astype(np.float32)
        return torch.from_numpy(np.clip(np.round(w * (1 / scale)), -128, 127).astype(np.float32) * scale)
    blocks = w.reshape(-1, 64)
    largest = np.abs(blocks).max(axis=1)
    codes = np.abs((blocks / largest[:, None])[..., None] - np.float32(NF4)).argmin(axis=-1)
    shared = 256
    while len(largest) % shared:
        shared //= 2
    mean = torch.from_numpy(largest).mean().numpy()  # in the order in which torch adds
    apart = (largest - mean).reshape(-1, shared)
    factor = np.float32(256) / (2 * np.abs(apart).max(axis=1, keepdims=True))
    scales = (np.clip(np.round(apart * factor), -128, 127) / factor).reshape(-1) + mean
    return torch.from_numpy((np.float32(NF4)[codes] * scales[:, None]).reshape(w.shape))


@pytest.mark.parametrize("kept_as, bits, error", [("bfloat16", 16, 0.003), ("int8", 8, 0.02), ("nf4", 4, 0.15)])
def test_a_weight_in_fewer_bits_is_what_its_formula_says(kept_as, bits, error):
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(0))
    stored = narrowed(weight, kept_as)
    wide = widened(stored, torch.float32)
    torch.testing.assert_close(wide, by_hand(weight, kept_as), rtol=2e-6, atol=1e-7)
    assert 0 < (wide - weight).norm() / weight.norm() < error
    parts = [stored] if type(stored) is torch.Tensor else [x for x in vars(stored).values() if torch.is_tensor(x)]
    num_bits = 8 * sum(x.nbytes for x in parts) / weight.numel()
    assert bits <= num_bits < 1.1 * bits


def test_what_nf4_cannot_hold_is_named():
    with pytest.raises(ValueError, match=r"\(3, 5\) cannot be kept as nf4.* use --lora_base int8"):
        narrowed(torch.randn(3, 5), "nf4")
    for weight in (torch.zeros(8, 64), torch.full((8, 64), 0.5)):  # all scales alike
        assert torch.equal(widened(narrowed(weight, "nf4"), torch.float32), weight)
    layer = FrozenLinear(nn.Linear(64, 8), "nf4", CPU)
    layer.stored[3, 4] = torch.nan
    with pytest.raises(ValueError, match=r"weights of \(8, 64\) are not finite as nf4"):
        layer.narrow()


def test_without_the_package_it_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchao"]:
        monkeypatch.setitem(sys.modules, name, None)
    for kept_as in ("int8", "nf4"):
        with pytest.raises(ValueError, match=f"--lora_base {kept_as} needs a package: pip install torchao=="):
            narrowed(torch.randn(64, 64), kept_as)
    assert narrowed(torch.randn(4, 4), "bfloat16").dtype == torch.bfloat16


# ---- One process, copies and shards ---------------------------------------------------------------------------------


def reference(kept_as: str) -> dict:
    """Train adapters with plain PyTorch on a plain network whose block layers hold what `by_hand` says."""
    model = MMDiT(CONFIG).requires_grad_(False)
    narrow, factors = linear_weights(model, FSDP_UNITS), {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            init(name, parameter)
            if name in narrow:
                parameter.copy_(by_hand(parameter, kept_as))
    unused = {id(p) for p in without_gradient(model)}
    for name, layer in [found for pattern in LORA_TARGETS for found in matching_modules(model, pattern)]:
        if id(layer.weight) not in unused:
            (rows, columns), parts = layer.weight.shape, []
            for part, shape in (("lora_A", (RANK, columns)), ("lora_B", (rows, RANK))):
                part = f"{name}.{part}.weight"
                factors[part] = nn.Parameter(init_factor(part, shape, torch.float32))
                parts.append(factors[part])
            layer.register_forward_hook(partial(add_update, layer, *parts))
    result, optimizer = {"loss": [], "grad": {}}, torch.optim.AdamW(factors.values(), lr=1e-2)
    for step in range(2):
        loss = losses(model, list(range(len(SAMPLES))), step, torch.float32).mean()
        loss.backward()
        result["grad"] = result["grad"] or {n: p.grad.clone() for n, p in factors.items()}
        result["loss"].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return result


def content(model: nn.Module) -> dict[str, str]:
    """Return a hash of what each layer in fewer bits holds."""
    found = {}
    for name, layer in compressed_layers(model).items():
        stored = layer.stored
        parts = {"": stored} if type(stored) is torch.Tensor else vars(stored)
        named = [(k, x.reshape(-1)) for k, x in parts.items() if torch.is_tensor(x)]
        found[name] = fingerprint(named)
    return found


def adapt(kept_as: str, how: str, checkpointing: str = "none", compiled: bool = False) -> dict:
    """Train on this process's part of the samples as the scripts do.  how: ddp or fsdp."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    with torch.device("meta"):
        model = MMDiT(CONFIG)
    skip = without_gradient(model)
    apply_lora(model, LORA_TARGETS, RANK, ALPHA, skip=skip)
    compress_base(model, kept_as, FSDP_UNITS, CPU)
    apply_activation_checkpointing(model, FSDP_UNITS, checkpointing)
    if compiled:
        torch.compiler.reset()
        compile_units(model, FSDP_UNITS, "aot_eager")
    if how == "fsdp":
        mesh = weights_mesh(build_mesh("cpu", 1, num_ranks, 1, 1))
        shard_model(model, FSDP_UNITS, mesh, torch.float32, torch.float32, True)
    materialize(model, CPU, init, seed=7)
    trained, before, record = trained_parameters(model), content(model), base_record(model)
    for name, parameter in trained.items():
        local = parameter.to_local() if how == "fsdp" else parameter
        local.detach().copy_(init_factor(name, parameter.shape, torch.float32)[local_slice(parameter)])
    network = replicate(model, 25.0, torch.float32) if how == "ddp" else model
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    result, mine = {"loss": [], "grad": {}}, list(range(len(SAMPLES)))[rank::num_ranks]
    for step in range(2):
        loss = losses(network, mine, step, torch.float32, FILL_TO if compiled else None).sum() / len(SAMPLES)
        loss.backward()
        result["grad"] = result["grad"] or {n: full(p.grad) for n, p in trained.items()}
        total = loss.detach().clone()
        dist.all_reduce(total)
        result["loss"].append(total.item())
        optimizer.step()
        optimizer.zero_grad()
    assert content(model) == before and len(before) > 20 and base_record(model) == record
    assert record["base"]["kept_as"] == kept_as and record["base"]["dtype"] == "float32"
    return result | {"record": record, "base": before}


def adapt_on_ranks(rank: int, world_size: int, cases: list[dict]) -> list[dict]:
    return [adapt(**case) for case in cases]


SAMPLE = [
    dict(kept_as="bfloat16", how="ddp"),
    dict(kept_as="nf4", how="ddp"),
    dict(kept_as="nf4", how="fsdp", checkpointing="full"),
    dict(kept_as="int8", how="fsdp", checkpointing="selective", compiled=True),
]
EVERY = [
    dict(kept_as=kept_as, how=how, checkpointing=checkpointing, compiled=compiled)
    for kept_as in FORMATS
    for how in ("ddp", "fsdp")
    for checkpointing in ("none", "full", "selective")
    for compiled in (False, True)
    if how == "fsdp" or not compiled
]


@pytest.mark.parametrize("cases", [SAMPLE, pytest.param(EVERY, marks=pytest.mark.exhaustive)], ids=["sample", "every"])
def test_adapters_learn_what_they_learn_on_the_base_written_out(cases):
    expected, records, bases = {kept_as: reference(kept_as) for kept_as in FORMATS}, set(), {}
    results = run_ranks(adapt_on_ranks, 2, cases, timeout_s=300)
    for case, result, other in zip(cases, *results, strict=True):
        theirs = expected[case["kept_as"]]
        assert result["loss"] == pytest.approx(theirs["loss"], rel=2e-5), case
        assert result["grad"].keys() == theirs["grad"].keys()
        for name, gradient in theirs["grad"].items():
            assert (result["grad"][name] - gradient).norm() <= 2e-5 * gradient.norm() + 1e-8, (case, name)
        assert result["record"] == other["record"]
        records.add(result["record"]["base"]["fingerprint"])
        assert bases.setdefault(case["kept_as"], result["base"]) == result["base"]
    assert len(records) == 1  # all of the same weights, before they were put into fewer bits
    different = [expected[a]["loss"][0] for a in FORMATS]
    assert len(set(different)) == 3


def refused(rank: int, world_size: int) -> str:
    with torch.device("meta"):
        model = MMDiT(CONFIG)
    apply_tensor_parallel(
        model, train_mmdit.mmdit_plan.TENSOR_PARALLEL_PLAN, weights_mesh(build_mesh("cpu", 1, 1, 1, 2))["tp"]
    )
    apply_lora(model, LORA_TARGETS, RANK, ALPHA, skip=without_gradient(model))
    try:
        compress_base(model, "int8", FSDP_UNITS, CPU)
    except ValueError as error:
        return str(error)
    return ""


def test_layers_that_are_cut_are_refused_on_every_rank():
    for message in run_ranks(refused, 2):
        assert "--lora_base int8 keeps layers whole on every rank, and --tp cuts them; use --tp 1" in message


# ---- Through the command line ---------------------------------------------------------------------------------------


def test_the_edit_script_resumes_to_the_bit(folder, tmp_path):
    model = make_released(tmp_path / "model", MMDiTConfig.from_folder(TINY / "transformer"))
    flags = ["--model", str(model), "--train", "renderer", "--lora_rank", "4", "--lora_base", "nf4"]
    whole, part = tmp_path / "whole", tmp_path / "part"
    train(folder, whole, *flags, "--num_steps", "2", "--save_every", "2", ranks=2)
    train(folder, part, *flags, "--num_steps", "1", "--save_every", "1", ranks=2)
    train(folder, part, *flags, "--num_steps", "2", "--save_every", "1", ranks=2)
    expected, mine = state(whole, 2), state(part, 2)
    assert expected.keys() == mine.keys() and all(torch.equal(mine[name], tensor) for name, tensor in expected.items())
    assert lines(part, "samples_seen.jsonl") == lines(whole, "samples_seen.jsonl")
    printed = train(folder, part, *flags[:-1], "int8", "--num_steps", "4", expect=2)
    assert "lora_base" in printed and "Traceback" not in printed


def test_it_needs_adapters(folder, tmp_path):
    printed = train(folder, tmp_path / "run", "--lora_base", "int8", expect=2)
    assert "--lora_base int8 is of what lies under adapters; add --lora_rank" in printed


@pytest.mark.parametrize("kept_as", ["int8", "nf4"])
def test_diffusers_draws_on_the_same_base_what_we_draw(kept_as, tmp_path):
    model = make_released(tmp_path / "model", MMDiTConfig.from_folder(TINY / "transformer"), torch.bfloat16)
    run = tmp_path / "run"
    config = train_mmdit.Config(
        model=str(model), run_folder=str(run), cache_folder=str(tmp_path / "cache"), num_steps=3, lr=0.02,
        global_batch_size=4, max_tokens_per_micro_batch=200, warmup_steps=1, eval_every=0, sample_every=0,
        save_every=3, lora_rank=16, lora_alpha=24.0, lora_base=kept_as, ema_decay=0.5,
    )  # fmt: skip
    train_mmdit.main(config)
    sample.main(sample.Config(run=str(run), output=str(tmp_path / "pictures"), **SETTINGS))
    file = tmp_path / "adapter.safetensors"
    export_lora.main(export_lora.Config(str(run), str(file), dtype="float32"))
    pipeline = QwenImagePipeline.from_pretrained(model, torch_dtype=torch.float32, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    with torch.device("meta"):
        narrow = linear_weights(MMDiT(MMDiTConfig.from_folder(model / "transformer")), FSDP_UNITS)
    with torch.no_grad():
        for name, parameter in pipeline.transformer.named_parameters():
            if name in narrow:
                parameter.copy_(by_hand(parameter, kept_as))
    base = draw(pipeline, PROMPTS[0], 0)
    pipeline.load_lora_weights(str(file.parent), weight_name=file.name)
    theirs = draw(pipeline, PROMPTS[0], 0)
    assert abs(picture(tmp_path / "pictures/000.png") - theirs).max() <= 1
    assert abs(base - theirs).mean() > 5  # the adapter did something
    # Built in, they are on the same base; another base is refused.
    export.main(export.Config(str(run), str(tmp_path / "merged"), dtype="float32", merge=True))
    merged, down_up = read_safetensors(tmp_path / "merged/transformer"), read_safetensors(file)
    layer, plain = "transformer_blocks.0.img_mlp.net.2", read_safetensors(model / "transformer")
    up, down = (down_up[f"transformer.{layer}.lora_{part}.weight"] for part in "BA")
    expected = by_hand(plain[f"{layer}.weight"].float(), kept_as) + 1.5 * up @ down
    torch.testing.assert_close(merged[f"{layer}.weight"], expected, rtol=1e-5, atol=1e-6)
