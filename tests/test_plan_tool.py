"""The plan against real steps on four processes, against a full trace, and against closed forms."""

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from PIL import Image
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.memory import Measured, measure, step_bytes, sum_collectives
from model.attention import packed_attention
from model.layout import PackedLayout
from model.mmdit import MMDiT, MMDiTConfig
from parallel.collective_trace import Collective
from parallel.fake_world import cuda_branches, fake_tensors
from parallel.module_position import Position
from tests.spawn import run_ranks
from tools.plan import Config, main, parse_samples
from tools.plan_depth import PlannedStep, plan_step
from tools.plan_search import candidates
from tools.plan_step import StepSettings, TracedStep, trace_step
from tools.plan_time import ROOFLINE, Shares, collective_seconds, group_axes, step_time
from utils.devices import Device, find_device
from utils.flops import mmdit_forward_flops

TINY = MMDiTConfig(
    num_layers=3, attention_head_dim=16, num_attention_heads=4, joint_attention_dim=24, axes_dims_rope=(4, 6, 6)
)
PACK = {"grids": (((1, 4, 4),), ((1, 4, 6), (1, 2, 4))), "txt_lens": (7, 12)}
ON_CPU = StepSettings(model=TINY, **PACK, dtype=torch.float32, cuda=False)


def measure_on_ranks(rank: int, world_size: int, cases: list[StepSettings]) -> list[Measured]:
    return [measure(settings) for settings in cases]


def test_a_plan_is_what_four_processes_do():
    large = {"grids": (((1, 16, 16),),) * 2, "txt_lens": (40, 50)}
    cases = [
        replace(ON_CPU, **large, dp_shard=2, tp=2, activation_checkpointing="none", accumulate=2),
        replace(ON_CPU, **large, dp_shard=4, dtype=torch.bfloat16, activation_checkpointing="full"),
        replace(ON_CPU, **large, cp=2, tp=2, tp_sequence_parallel=True, activation_checkpointing="selective"),
        replace(ON_CPU, dp_replicate=2, dp_shard=2, accumulate=3, reshard_after_forward=False),
    ]
    for rank, results in enumerate(run_ranks(measure_on_ranks, 4, cases)):
        for settings, real in zip(cases, results, strict=True):
            if rank and settings is not cases[0]:
                continue  # shards of other ranks are seen in the first case
            plan = trace_step(settings, rank)
            assert plan.num_bytes == real.num_bytes
            assert min(real.num_bytes.values()) > 0
            assert sum_collectives(plan.trace) == real.collectives
            assert step_bytes(plan.trace, plan.num_bytes) == real.traced_peak


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_the_peak_is_the_allocators(checkpointing):
    """On one process: with several, gloo's own buffers come and go in the allocator as its threads happen to run."""
    large = {"grids": (((1, 16, 16),),) * 2, "txt_lens": (40, 50)}  # else the kernels' own scratch memory weighs in
    settings = replace(ON_CPU, **large, activation_checkpointing=checkpointing)
    plan = trace_step(settings)
    ((real,),) = run_ranks(measure_on_ranks, 1, [settings])
    assert step_bytes(plan.trace, plan.num_bytes) == pytest.approx(real.allocator_peak, rel=0.05)


def whole(step: TracedStep) -> PlannedStep:
    """Take a full trace as a plan: nothing is extrapolated."""
    trace = step.trace
    return PlannedStep(step.settings, step.num_bytes, trace.memory.peaks(), trace.work, trace.collectives)


def assert_same(plan: PlannedStep, full: PlannedStep) -> None:
    assert plan.num_bytes == full.num_bytes
    assert plan.totals("collectives") == full.totals("collectives") == sum(full.collectives.values(), Counter())
    assert plan.totals("work") == full.totals("work") == sum(full.work.values(), Counter())
    assert plan.peak()[1].total() == full.peak()[1].total()


@pytest.mark.parametrize(
    "changes",
    [
        {"dp_shard": 8, "tp": 2, "activation_checkpointing": "none"},
        {"dp_shard": 4, "dp_replicate": 2, "activation_checkpointing": "full", "reshard_after_forward": False},
    ],
)
def test_depth_is_extrapolated_exactly(changes):
    settings = replace(ON_CPU, model=replace(TINY, num_layers=8), **changes)
    plan, full = plan_step(settings), whole(trace_step(settings))
    assert_same(plan, full)
    # Not only the peak of all: every position's, to the byte and by kind and module.
    for position, breakdown in plan.peaks.items():
        assert breakdown.by_kind() == full.peaks[position].by_kind(), position
        assert {k: n for k, n in breakdown.items() if n} == full.peaks[position], position


@pytest.mark.parametrize("dp_replicate", [1, 2])
def test_micro_batches_are_extrapolated_exactly(dp_replicate):
    settings = replace(ON_CPU, dp_replicate=dp_replicate, dp_shard=2, accumulate=4)
    assert_same(plan_step(settings), whole(trace_step(settings)))


def test_bytes_and_collectives_equal_closed_forms():
    settings = StepSettings(
        model=TINY, **PACK, dp_shard=2, dp_replicate=2, tp=2, activation_checkpointing="none", accumulate=2
    )
    plan = plan_step(settings)
    with torch.device("meta"):
        sizes = {name: p.numel() for name, p in MMDiT(TINY).named_parameters()}
    replicated = sum(n for name, n in sizes.items() if _is_replicated(name))
    on_a_rank = ((sum(sizes.values()) - replicated) // 2 + replicated) // 2
    assert plan.num_bytes["parameters"] == plan.num_bytes["EMA"] == 4 * on_a_rank
    assert plan.num_bytes["optimizer"] == 8 * on_a_rank + 4 * len(sizes)  # two moments, and a counter each

    totals = plan.totals("collectives")
    by_axes = Counter()
    for collective, count in totals.items():
        by_axes[collective.kind, group_axes(collective.ranks, settings)] += count
    units = TINY.num_layers + 1
    assert by_axes["all_gather", ("dp_shard",)] == 2 * 2 * units  # forward and backward of two micro-batches
    assert by_axes["reduce_scatter", ("dp_shard",)] == 2 * units
    assert by_axes["all_reduce", ("dp_replicate",)] == units  # once a step
    gathered = max(c.num_bytes for c in totals if c.kind == "all_gather" and c.ranks == (0, 2))
    scattered = max(c.num_bytes for c in totals if c.kind == "reduce_scatter")
    block = {name: n for name, n in sizes.items() if name.startswith("transformer_blocks.0.")}
    whole_block = sum(n if _is_replicated(name) else n // 2 for name, n in block.items())
    assert gathered == 2 * whole_block and scattered == 4 * whole_block  # bfloat16 weights, float32 gradients
    # Megatron-LM's two sums forward, of each stream; the last block has no text output.
    num_img, num_txt = sum(settings.img_lens), sum(settings.txt_lens)
    forward = sum((c for p, c in plan.collectives.items() if p.phase == "forward" and p.micro_batch == 0), Counter())
    assert forward[Collective("all_reduce", 2 * num_img * TINY.width, (0, 1))] == 2 * TINY.num_layers
    assert forward[Collective("all_reduce", 2 * num_txt * TINY.width, (0, 1))] == 2 * (TINY.num_layers - 1)


def _is_replicated(name: str) -> bool:
    """Return whether tensor parallelism keeps a parameter whole on every rank."""
    sums = ("net.2.bias", "to_out.0.bias", "to_add_out.bias", "linear_2.bias")  # added after the sum over the ranks
    return name.endswith(sums) or name.startswith("proj_out") or name == "txt_norm.weight" or ".attn.norm_" in name


def test_forward_arithmetic_equals_the_formula():
    plan = plan_step(replace(ON_CPU, cuda=True, dtype=torch.bfloat16, activation_checkpointing="full"))
    flops = Counter()
    for position, work in plan.work.items():
        for item, count in work.items():
            flops[position.phase, item.recomputed] += count * item.flops
    forward = mmdit_forward_flops(TINY, ON_CPU.img_lens, ON_CPU.txt_lens)
    assert flops["forward", False] == forward
    # Blocks are computed again; a flash backward has five products for the forward's two.
    attention = TINY.num_layers * sum(4 * n * n * TINY.width for n in ON_CPU.attention_lens)
    assert 0.9 * forward < flops["backward", True] < forward
    assert flops["backward", False] == pytest.approx(2 * forward + attention / 2, rel=0.06)


def saved_bytes(compute) -> int:
    """Return the bytes of all storages that autograd keeps, each once."""
    storages = {}
    with saved_tensors_hooks(lambda t: storages.setdefault(t.untyped_storage()._cdata, t) is None or t, lambda t: t):
        compute()
    return sum(t.untyped_storage().nbytes() for t in storages.values())


def test_cuda_kernels_keep_what_their_papers_say():
    layout = PackedLayout.build([[(1, 4, 4)], [(1, 6, 4)]], [7, 12])
    length, heads, channels = 59, 4, 16
    with fake_tensors() as mode, cuda_branches():
        q, k, v = (torch.empty(length, heads, channels, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        bounds = replace(layout, cu_seqlens=mode.from_tensor(layout.cu_seqlens))
        kept = saved_bytes(lambda: packed_attention(q, k, v, bounds))
        # FlashAttention (arXiv 2205.14135): inputs, output, and a float32 log-sum-exp a query; no score matrix.
        small = 3 * 4 + 2 * 8  # bounds of the samples, state of a random stream
        assert kept == 4 * length * heads * channels * 2 + length * heads * 4 + small
        norm = torch.nn.RMSNorm(channels, eps=1e-6, dtype=torch.bfloat16)
        assert saved_bytes(lambda: norm(q)) == (length * heads * channels + channels) * 2 + length * heads * 4
    assert not torch.empty(1).is_cuda


FAST_LINKS = Device("ideal", 1e12, 1e12, 80.0, 1e12, 1e30, 1e30, 1.0)


def test_times_follow_the_roofs():
    settings = replace(ON_CPU, dp_shard=16, dtype=torch.bfloat16, cuda=True, accumulate=2)
    plan = plan_step(settings)
    infinite = step_time(plan, replace(FAST_LINKS, bf16_flops=1e30, fp32_flops=1e30), ROOFLINE)
    traffic = sum(count * work.traffic for work, count in plan.totals("work").items())
    assert infinite.compute == pytest.approx(traffic / 1e12)
    slow = step_time(plan, replace(FAST_LINKS, memory_bandwidth=1e30), ROOFLINE)
    flops = sum(count * work.flops for work, count in plan.totals("work").items())
    assert slow.compute == pytest.approx(flops / 1e12)
    assert slow.model_flops == 2 * 3 * mmdit_forward_flops(TINY, ON_CPU.img_lens, ON_CPU.txt_lens)
    half = step_time(plan, replace(FAST_LINKS, memory_bandwidth=1e30), Shares(0.5, 0.5))
    assert half.compute == pytest.approx(2 * slow.compute)
    for links in (1e5, 1e8, 1e11):
        time = step_time(plan, replace(FAST_LINKS, nvlink_bandwidth=links, network_bandwidth=links), ROOFLINE)
        assert max(time.compute + time.waited_for, time.overlappable) <= time.overlapped <= time.serial


def test_a_collective_is_a_ring():
    device = Device("d", 1e12, 1e12, 80.0, 1e12, 400e9, 50e9, 1.0)
    within = Collective("all_gather", 8 * 10**9, tuple(range(8)))
    assert collective_seconds(within, device, ROOFLINE, 8) == pytest.approx(7e9 / 400e9, rel=0.01)
    # Two nodes, all eight cards of each: still NVLink's pace; with one member a node, its one card.
    assert collective_seconds(
        Collective("reduce_scatter", 16 * 10**9, tuple(range(16))), device, ROOFLINE, 8
    ) == pytest.approx(15e9 / 400e9, rel=0.01)
    across = Collective("all_reduce", 2 * 10**9, (0, 8))
    assert collective_seconds(across, device, ROOFLINE, 8) == pytest.approx(2 * 1e9 / 50e9, rel=0.01)
    assert group_axes((0, 8), replace(ON_CPU, dp_replicate=2, dp_shard=4, tp=2)) == ("dp_replicate",)
    assert group_axes((1, 3, 5, 7), replace(ON_CPU, dp_replicate=2, dp_shard=4, tp=2)) == ("dp_shard",)


def test_a_device_is_known_by_its_word():
    names = ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA B200")
    assert [find_device(name).name for name in names] == ["H100", "H100 PCIe", "H200", "A100", "B200"]
    assert find_device("NVIDIA GH200 480GB") is None and find_device("NVIDIA L4") is None


def test_search_keeps_to_heads_nodes_and_batch():
    base = replace(StepSettings(), model=MMDiTConfig(num_layers=2))  # 24 heads
    found = list(candidates(base, 32, 8, 64))
    assert {s.tp for s in found} == {1, 2, 4, 8} and all(24 % (s.tp * s.cp) == 0 for s in found)
    assert all(s.num_ranks == 32 and s.dp_replicate * s.dp_shard * s.accumulate == 64 for s in found)
    assert {s.dp_replicate for s in found} == {1, 2, 4}
    assert len(set(found)) == len(found)


def test_the_command_writes_what_it_prints(tmp_path, capsys):
    model = tmp_path / "transformer"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY.to_json()))
    flags = {"model": str(tmp_path), "samples": ("32x32:5",), "device": "A100", "encoders_gib": 0.0}
    output, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    main(Config(**flags, gpus=2, tp=2, output=str(output), picture=str(picture)))
    (plan,) = json.loads(output.read_text())
    assert plan["peak"]["fits"] and sum(plan["peak"]["by_kind"].values()) == plan["peak"]["bytes"]
    assert plan["settings"]["dtype"] == "bfloat16" and plan["settings"]["tp"] == 2
    assert "1 × 1 × 1 × 2" in capsys.readouterr().out
    assert Image.open(picture).size[1] > 400
    with pytest.raises(ValueError, match="3 ranks, --gpus says 2"):
        main(Config(**flags, gpus=2, dp_shard=3))
    with pytest.raises(ValueError, match="--tp 8 does not divide"):
        main(Config(**flags, gpus=8, tp=8))
    with pytest.raises(ValueError, match="not in utils/devices.py"):
        main(Config(**flags | {"device": "abacus"}))
    with pytest.raises(ValueError, match="no multiple of the 2 samples"):
        main(Config(**flags, gpus=2, global_batch_size=3))
    with pytest.raises(ValueError, match="activation_checkpointing"):
        main(Config(**flags, gpus=2, activation_checkpointing="some"))


@pytest.mark.parametrize("text", ["1024", "0x16", "20x16", "16x16:", "2*", "16x16+:5"])
def test_unreadable_samples_are_refused(text):
    with pytest.raises(ValueError, match="--samples"):
        parse_samples((text,))


@pytest.mark.parametrize(
    ("samples", "said"),
    [((), "needs a sample"), (("0*32x32:5",), "at least 1, got 0"), (("32x32", "00*32x32"), "at least 1, got 00"),
     (("32x32+32x32+32x32+32x32+32x32",), "at most 3 references, got 4")],
)  # fmt: skip
def test_a_micro_batch_that_no_run_has_is_refused(samples, said):
    with pytest.raises(ValueError, match=said):
        main(Config(samples=samples, gpus=1, model="assets/tiny"))
    assert len(parse_samples(("32x32+32x32+32x32+32x32",))[0][0]) == 4  # three references are an edit's


def test_samples_are_read():
    grids, txt_lens = parse_samples(("2*32x48+16x16:7", "16x32"))
    assert grids == (((1, 2, 3), (1, 1, 1)),) * 2 + (((1, 1, 2),),) and txt_lens == (7, 7, 200)


def test_positions_are_those_of_the_network():
    trace = trace_step(replace(ON_CPU, activation_checkpointing="full")).trace
    stages = ["before", 0, 1, 2, "after"]
    assert [p for p in trace.memory.peaks() if p.phase == "forward"] == [Position(0, "forward", s) for s in stages]
    backward = [p.stage for p in trace.memory.peaks() if p.phase == "backward"]
    assert backward == ["before", 2, 1, 0, "after"]
    # Each block's products are done in its own backward: as many as in its neighbour's.
    products = {
        k: sum(n * w.flops for w, n in trace.work[Position(0, "backward", k)].items() if not w.recomputed)
        for k in range(3)
    }
    assert products[0] == products[1] > products[2] > 0
