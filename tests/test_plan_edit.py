"""The plan of the edit script's step against real steps in DDP, and against closed forms."""

import json
from dataclasses import replace

import pytest
import torch
from diffusers import AutoencoderKLQwenImage
from transformers import Qwen2_5_VLForConditionalGeneration

import train_edit_ddp
import train_mmdit
from benchmarks.edit_memory import Config as Benchmark
from benchmarks.edit_memory import Measured, measure, settings
from model.mmdit import MMDiT
from tests.spawn import run_ranks
from tools import plan
from tools.plan_edit import plan_edit
from tools.plan_edit_settings import EditSettings, released_vlm

TINY = settings(Benchmark(num_samples=8))
CASES = [TINY, replace(TINY, freeze_vision=True), replace(TINY, train="renderer", lora_rank=4, lora_base="nf4")]


def measure_on_ranks(rank: int, world_size: int, cases: list[EditSettings]) -> list[Measured]:
    return [measure(case) for case in cases]


def test_a_plan_is_what_a_real_step_does():
    """Bytes between steps to the byte, the step's peak within 5 % of what the allocator reports."""
    results = run_ranks(measure_on_ranks, 1, CASES, timeout_s=300)[0]
    plans = [plan_edit(case) for case in CASES]
    for case, found, planned in zip(CASES, results, plans, strict=True):
        assert planned.num_bytes == found.num_bytes, case.train
        assert planned.kept() == found.kept, case.train
        assert planned.step_adds() == pytest.approx(found.allocator_peak, rel=0.05), case.train
    # What a frozen tower saves: its gradients, its AdamW states, and what its backward pass would need.
    whole, frozen = plans[:2]
    with torch.device("meta"):
        vlm = Qwen2_5_VLForConditionalGeneration(TINY.vlm)
    tower = sum(p.numel() for p in vlm.model.visual.parameters())
    num = len(list(vlm.model.visual.parameters()))
    assert whole.num_bytes["gradients"] - frozen.num_bytes["gradients"] == 4 * tower
    assert whole.num_bytes["optimizer"] - frozen.num_bytes["optimizer"] == 8 * tower + 4 * num
    assert frozen.kept()["planner"] < 0.75 * whole.kept()["planner"]
    assert frozen.kept()["renderer"] < whole.kept()["renderer"]  # in its backward the planner's are still there


def measure_zero(rank: int, world_size: int) -> int:
    return measure(replace(TINY, num_ranks=world_size, zero=True, train="planner")).num_bytes["optimizer"]


def test_zero_shares_out_what_two_ranks_share_out():
    shares = run_ranks(measure_zero, 2)
    case = replace(TINY, num_ranks=2, zero=True, train="planner")
    assert [plan_edit(case, rank).num_bytes["optimizer"] for rank in range(2)] == shares
    assert sum(shares) == plan_edit(replace(case, num_ranks=1, zero=False)).num_bytes["optimizer"]
    on_gpus = plan_edit(replace(case, num_ranks=8, dtype=torch.bfloat16, cuda=True)).num_bytes
    assert sum(shares) / 8 <= on_gpus["optimizer"] < sum(shares) / 3  # the largest matrix is one rank's


def test_bytes_equal_closed_forms():
    with torch.device("meta"):
        linear = [m for m in MMDiT(TINY.renderer).transformer_blocks.modules() if isinstance(m, torch.nn.Linear)]
        network = sum(p.numel() for p in MMDiT(TINY.renderer).parameters())
    narrow = sum(m.weight.numel() for m in linear)
    lora = replace(TINY, train="renderer", lora_rank=4, dtype=torch.bfloat16)
    plain, int8 = plan_edit(lora), plan_edit(replace(lora, lora_base="int8"))
    adapters = plain.num_bytes["gradients"]
    assert plain.num_bytes["parameters"] == 2 * network + adapters and plain.num_bytes["EMA"] == adapters
    rows = sum(m.out_features for m in linear)
    assert int8.num_bytes["parameters"] == plain.num_bytes["parameters"] - narrow + 5 * rows  # a scale, a zero point
    # Without recomputation a block more keeps more; with it, its input alone.
    assert plan_edit(replace(lora, activation_checkpointing="full")).kept()["renderer"] < 0.2 * plain.kept()["renderer"]


def test_the_released_encoders_weigh_what_the_plan_says():
    with torch.device("meta"):
        vlm, vae = Qwen2_5_VLForConditionalGeneration(released_vlm()), AutoencoderKLQwenImage()
    sizes = [2 * sum(p.numel() for p in m.parameters()) for m in (vlm.model.language_model, vlm, vae)]
    assert sizes == [plan.LANGUAGE_MODEL_BYTES, plan.VLM_BYTES, plan.VAE_BYTES]
    assert sizes[1] == 2 * 8_292_166_656  # as Qwen2.5-VL-7B-Instruct's model card and index have it


def test_the_command_says_whether_it_fits(tmp_path, capsys):
    flags = {"model": "assets/tiny", "samples": ("96x96+96x96+96x96:12",), "device": "A100", "condition_pixels": 9216}
    output = tmp_path / "plan.json"
    plan.main(plan.Config(**flags, gpus=2, train="planner,renderer", output=str(output), reserve_gib=4.0))
    printed, written = capsys.readouterr().out, json.loads(output.read_text())
    assert "fits, " in printed and written["peak"]["fits"] and sum(written["peak"]["by_kind"].values()) > 0
    plan.main(plan.Config(**flags, gpus=2, train="renderer", lora_rank=4, reserve_gib=64.9))
    assert "OVER by 1.5 GiB: it would run out of memory" in capsys.readouterr().out
    for wrong, words in (
        ({"train": "vae"}, "--train must be one of"),
        ({"train": "renderer", "tp": 2}, "no mesh, no --search"),
        ({"train": "renderer", "global_batch_size": 3}, "no multiple of the 2 samples"),
    ):
        with pytest.raises(ValueError, match=words):
            plan.main(plan.Config(**flags, gpus=2, **wrong))


@pytest.mark.parametrize("script", [train_mmdit, train_edit_ddp])
def test_a_plan_s_defaults_are_the_scripts(script):
    """What the plan calls as the scripts do has their default; but --optimizer, whose tiny-model default is another."""
    planned, trained = vars(plan.Config()), vars(script.Config())
    shared = {name for name in planned.keys() & trained.keys()} - {
        "model", "dtype", "global_batch_size", "optimizer", "train", "condition_pixels",
    }  # fmt: skip
    assert {"activation_checkpointing", "lora_rank", "lora_base"} <= shared
    assert {name: planned[name] for name in shared} == {name: trained[name] for name in shared}


def test_fsdp_with_adapters_is_planned_as_it_trains():
    from tests.test_plan_tool import ON_CPU, trace_step

    with torch.device("meta"):
        network = sum(p.numel() for p in MMDiT(ON_CPU.model).parameters())
    adapted = trace_step(replace(ON_CPU, dp_shard=2, lora_rank=4)).num_bytes
    base = 4 * network // 2
    assert adapted["gradients"] == adapted["EMA"] and adapted["parameters"] == base + adapted["gradients"]
    assert adapted["gradients"] < 0.2 * base
    whole = trace_step(replace(ON_CPU, dp_shard=2, lora_rank=4, lora_base="bfloat16")).num_bytes["parameters"]
    assert whole > 0.5 * base  # whole on every rank, in half the bytes
