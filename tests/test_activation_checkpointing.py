"""Checkpointed units compute the same to the bit, and run again just what they are to run again."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from model.layout import PackedLayout
from model.mmdit import MMDiT, MMDiTConfig
from model.mmdit_plan import FSDP_UNITS
from parallel.activation_checkpointing import apply_activation_checkpointing

NUM_BLOCKS = 4
CONFIG = MMDiTConfig(
    num_layers=NUM_BLOCKS, attention_head_dim=8, num_attention_heads=2, joint_attention_dim=12, in_channels=8,
    out_channels=2, axes_dims_rope=(2, 2, 4),
)  # fmt: skip
GELUS = 2 * NUM_BLOCKS - 1  # one a stream and block, but for the last block's text
RUNS = 2  # the samples are of two lengths, so every attention is two calls


class CountCalls(TorchDispatchMode):
    """Count the calls of each operator."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def run(mode: str) -> tuple[dict, Counter]:
    """Return every gradient, and how often each operator ran in forward and backward."""
    torch.manual_seed(0)
    model = MMDiT(CONFIG).double()
    names = list(model.state_dict())
    apply_activation_checkpointing(model, FSDP_UNITS, mode)
    assert list(model.state_dict()) == names
    layout = PackedLayout.build([[(1, 2, 2)], [(1, 3, 1)]], [3, 2])
    img, txt = torch.randn(7, 8).double(), torch.randn(5, 12).double()
    with CountCalls() as calls:
        model(img, txt, torch.tensor([0.2, 0.7]), layout).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, calls.counts


@pytest.fixture(scope="module")
def plain():
    gradients, counts = run("none")
    assert counts["gelu"] == GELUS and counts["_scaled_dot_product_flash_attention_for_cpu"] == RUNS * NUM_BLOCKS
    return gradients, counts


@pytest.mark.parametrize(
    "mode, more_gelus, more_attention, more_products",
    [
        ("full", GELUS, RUNS * NUM_BLOCKS, True),
        ("every_2", GELUS - 4, RUNS * 2, True),  # blocks 1 and 3 of 0 … 3
        ("every_3", 2, RUNS, True),  # block 2
        ("every_9", 0, 0, False),
        ("selective", GELUS, 0, False),
    ],
)
def test_runs_again_what_the_mode_says(plain, mode, more_gelus, more_attention, more_products):
    gradients, counts = run(mode)
    assert counts["gelu"] == plain[1]["gelu"] + more_gelus
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert counts[attention] == plain[1][attention] + more_attention
    products = [sum(c[name] for name in ("mm", "addmm", "bmm")) for c in (counts, plain[1])]
    assert (products[0] > products[1]) == more_products and products[0] >= products[1]
    assert gradients.keys() == plain[0].keys()
    assert all(torch.equal(gradients[name], plain[0][name]) for name in gradients)


@pytest.mark.parametrize("mode", ["some", "every_0", "every_", "every_2.5"])
def test_unknown_mode_is_refused(mode):
    with pytest.raises(ValueError, match=f"--activation_checkpointing must be one of none, full.*got '{mode}'"):
        apply_activation_checkpointing(MMDiT(CONFIG), FSDP_UNITS, mode)
