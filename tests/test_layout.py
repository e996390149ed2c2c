"""Packing by hand: what a layout says about a small, irregular micro-batch."""

import pytest
import torch
from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope

from model.layout import PackedLayout, shard_rows
from model.rope import rotary_factors

GRIDS = [[(1, 1, 2)], [(1, 1, 1), (1, 2, 1)], [(1, 1, 1)]]
TXT_LENS = [1, 2, 2]


def test_a_pack_by_hand():
    layout = PackedLayout.build(GRIDS, TXT_LENS)
    assert layout.img_sample.tolist() == [0, 0, 1, 1, 1, 2]
    assert layout.txt_sample.tolist() == [0, 1, 1, 2, 2]
    assert layout.is_reference.tolist() == [False, False, False, True, True, False]
    # Lengths 3, 5, 3: samples 0 and 2 share a run, then sample 1; text tokens 0–4, image tokens 5–10.
    assert layout.runs == ((2, 3), (1, 5)) and layout.max_seqlen == 5
    assert layout.joint_order.tolist() == [0, 5, 6, 3, 4, 10, 1, 2, 7, 8, 9]
    assert layout.joint_order[layout.joint_inverse].tolist() == list(range(11))
    assert layout.cu_seqlens.tolist() == [0, 3, 6, 11]
    assert layout.target_mean.tolist() == [[0.5, 0.5, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 0, 1]]


def test_a_filled_pack_by_hand():
    layout = PackedLayout.build(GRIDS, TXT_LENS, fill_to=(8, 6, 5))
    assert layout.img_sample.tolist() == [0, 0, 1, 1, 1, 2, 3, 3]
    assert layout.txt_sample.tolist() == [0, 1, 1, 2, 2, 3]
    assert layout.is_reference.tolist() == [False, False, False, True, True, False, True, True]
    # The filler has three tokens like samples 0 and 2, its second sample has none; text tokens 0–5, image tokens 6–13.
    assert layout.joint_order.tolist() == [0, 6, 7, 3, 4, 11, 5, 12, 13, 1, 2, 8, 9, 10]
    assert layout.cu_seqlens.tolist() == [0, 0, 3, 6, 9, 14] and layout.runs == ((3, 3), (1, 5))
    assert layout.num_samples == 5 and layout.num_filler_tokens == 3 and layout.img_lens == [2, 3, 1]
    assert layout.max_seqlen == 14
    assert layout.target_mean[:3, :6].equal(PackedLayout.build(GRIDS, TXT_LENS).target_mean)
    assert not layout.target_mean[3:].any() and not layout.target_mean[:, 6:].any()


def test_a_pack_with_just_room_for_an_empty_filler():
    layout = PackedLayout.build(GRIDS, TXT_LENS, fill_to=(6, 5, 4))
    assert layout.num_filler_tokens == 0 and layout.num_samples == 4 and layout.runs == ((2, 3), (1, 5))


@pytest.mark.parametrize("fill_to", [(5, 6, 5), (8, 4, 5), (8, 6, 3)])
def test_what_is_above_the_size_cannot_be_filled(fill_to):
    with pytest.raises(ValueError, match="cannot be filled"):
        PackedLayout.build(GRIDS, TXT_LENS, fill_to=fill_to)


@pytest.mark.parametrize("images", [[(1, 4, 4)], [(1, 5, 2), (1, 3, 8)], [(1, 1, 1), (1, 9, 3), (1, 2, 2), (1, 7, 7)]])
def test_rotary_equals_diffusers(images):
    reference = QwenEmbedRope(10_000, [4, 6, 6], scale_rope=True)
    img_table, txt_table = reference([images], torch.device("cpu"), 6)
    layout = PackedLayout.build([images], [6])
    factors = rotary_factors(layout.positions, (4, 6, 6), torch.float32)
    torch.testing.assert_close(factors[:, 0], torch.cat((txt_table, img_table)), atol=1e-6, rtol=0)


@pytest.mark.parametrize("grids, txt_lens", [([], []), ([[]], [1]), ([[(1, 1, 1)]], [0]), ([[(1, 0, 1)]], [1])])
def test_empty_samples_are_refused(grids, txt_lens):
    with pytest.raises(ValueError):
        PackedLayout.build(grids, txt_lens)


@pytest.mark.parametrize("num_groups, group_size", [(1, 2), (2, 1), (2, 2), (3, 1), (4, 2)])
def test_pieces_hold_every_token_once_and_attend_as_the_whole(num_groups, group_size):
    layout, num_pieces = PackedLayout.build(GRIDS, TXT_LENS), num_groups * group_size
    # Tokens by name, from 1: a stream's filling is 0.
    txt, img = torch.arange(1, 6), torch.arange(11, 17)
    pieces = [layout.shard(num_groups, group_size, i) for i in range(num_pieces)]
    txt_pieces, img_pieces = ([shard_rows(x, num_pieces, i) for i in range(num_pieces)] for x in (txt, img))
    assert torch.cat(txt_pieces)[:5].equal(txt) and torch.cat(img_pieces)[:6].equal(img)
    assert torch.cat([p.img_sample for p in pieces])[:6].equal(layout.img_sample)
    assert torch.cat([p.txt_sample for p in pieces])[:5].equal(layout.txt_sample)
    assert torch.cat([p.is_reference for p in pieces])[:6].equal(layout.is_reference)
    # The groups end to end, each its texts and its images, as attention receives them.
    groups = [slice(g * group_size, (g + 1) * group_size) for g in range(num_groups)]
    tokens = torch.cat([part for g in groups for part in (*txt_pieces[g], *img_pieces[g])])
    whole = torch.cat((txt, img))
    for piece in pieces:
        joint = tokens[piece.joint_order]
        assert joint[:11].equal(whole[layout.joint_order]) and not joint[11:].any()
        assert piece.positions[piece.joint_order][:11].equal(layout.positions[layout.joint_order])
        assert joint[piece.joint_inverse].equal(tokens)
        more = len(tokens) - 11
        assert piece.runs == layout.runs + ((1, more),) * bool(more) and piece.max_seqlen == max(5, more)
        assert piece.cu_seqlens.tolist() == [0, 3, 6, 11] + [11 + more] * bool(more)
