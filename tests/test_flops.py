"""The FLOP formula against PyTorch's own counter over the real network."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from model.layout import PackedLayout
from model.mmdit import MMDiT, MMDiTConfig
from utils.flops import device_peak, mmdit_forward_flops, mmdit_step_flops


def test_formula_equals_the_counter():
    config = MMDiTConfig(
        num_layers=3, attention_head_dim=16, num_attention_heads=4, joint_attention_dim=24, axes_dims_rope=(4, 6, 6)
    )
    grids, txt_lens = [[(1, 4, 4)], [(1, 2, 5), (1, 3, 3)], [(1, 4, 4)]], [7, 3, 7]
    layout = PackedLayout.build(grids, txt_lens)
    model = MMDiT(config)
    # The counter does not know the CPU's fused attention; plain products it does.
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(torch.randn(51, 64), torch.randn(17, 24), torch.rand(3), layout)
    assert mmdit_forward_flops(config, [16, 19, 16], txt_lens) == counter.get_total_flops()


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_step_s_formula_is_near_the_counter(is_frozen):
    """The counter also sees sums over tokens, which modulation makes as products: a few per cent at this width."""
    config = MMDiTConfig(
        num_layers=2, attention_head_dim=32, num_attention_heads=8, joint_attention_dim=24, axes_dims_rope=(8, 12, 12)
    )
    layout = PackedLayout.build([[(1, 20, 20)]], [60])
    model = MMDiT(config).requires_grad_(not is_frozen)
    inputs = torch.randn(400, 64), torch.randn(60, 24), torch.rand(1)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(*(x.requires_grad_() for x in inputs), layout).sum().backward()
    steps = {frozen: mmdit_step_flops(config, [400], [60], frozen) for frozen in (False, True)}
    assert steps[is_frozen] == pytest.approx(counter.get_total_flops(), rel=0.02)
    assert steps[True] < 0.75 * steps[False] and steps[False] == 3 * mmdit_forward_flops(config, [400], [60])


def test_unknown_device_has_no_peak():
    assert device_peak(torch.device("cpu"), torch.bfloat16) is None
