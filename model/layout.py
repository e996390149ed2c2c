"""Where each sample's tokens lie in a micro-batch that has no batch axis.

Legend: B samples in the micro-batch, I image tokens, T text tokens, L = I + T.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

Batch = TypeVar("Batch")
Grid = tuple[int, int, int]  # frames, rows, columns in tokens


@dataclass(frozen=True, eq=False)
class PackedLayout:
    """The packing of B samples: image tokens end to end in `img (I, ·)`, text tokens end to end in `txt (T, ·)`.

    Within a sample the target image comes first, then its references.  Attention runs in *joint order*: samples
    sorted by length, each as [its text, its images], so that samples of equal length lie side by side and can share
    one batched attention call without padding.

    A filled layout has the same sizes whatever it holds: tokens of no sample follow the samples' own, as one more
    segment that attends to itself alone, and empty segments make up the number of samples.  No filler token is a
    target, so that neither a loss nor a gradient depends on them.
    """

    num_samples: int  # B, with the filler's
    grids: tuple[tuple[Grid, ...], ...]  # lists of images: target first, then references; the filler has none
    txt_lens: tuple[int, ...]  # text tokens; without the filler's
    img_sample: Tensor  # (I,) int64: the sample of each image token
    txt_sample: Tensor  # (T,) int64: the sample of each text token
    is_reference: Tensor  # (I,) bool: no target; true of filler tokens too
    positions: Tensor  # (L, 3) int64: rotary position of each token of cat(txt, img) along frame, row, column
    joint_order: Tensor  # (L,) int64: joint[j] = cat(txt, img)[joint_order[j]]
    joint_inverse: Tensor  # (L,) int64: cat(txt, img)[i] = joint[joint_inverse[i]]
    cu_seqlens: Tensor  # (B + 1,) int32: bounds of the samples in joint order
    runs: tuple[tuple[int, int], ...]  # joint order as runs of (number of samples, length of each)
    max_seqlen: int  # no segment is longer; exact unless filled, and then L, the same for every layout

    @classmethod
    def build(
        cls,
        grids: Sequence[Sequence[Grid]],
        txt_lens: Sequence[int],
        device: torch.device | str = "cpu",
        fill_to: tuple[int, int, int] | None = None,
    ) -> "PackedLayout":
        """Lay out B samples.

        grids: for each sample its images as (frames, rows, columns) in tokens, target first, then references.
        txt_lens: for each sample the number of its text tokens.
        fill_to: (I, T, B) of a filled layout.
        Raises: ValueError for an empty micro-batch, a sample without an image or without text, or more than `fill_to`.
        """
        if len(grids) != len(txt_lens) or not grids:
            raise ValueError(
                f"need one text length a sample and at least one sample, got {len(grids)}, {len(txt_lens)}"
            )
        for b, (images, txt_len) in enumerate(zip(grids, txt_lens, strict=True)):
            if not images or txt_len < 1 or any(min(grid) < 1 for grid in images):
                raise ValueError(f"sample {b} needs an image and at least one text token: {images}, {txt_len} tokens")

        img_lens = [sum(f * h * w for f, h, w in images) for images in grids]
        target_lens = [images[0][0] * images[0][1] * images[0][2] for images in grids]
        img_positions = [_image_positions(i, grid) for images in grids for i, grid in enumerate(images)]
        # Text follows the largest image of its sample on the diagonal of the rotary axes.
        txt_starts = [max(max(h // 2, w // 2) for _, h, w in images) for images in grids]
        all_txt_lens = list(txt_lens)
        if fill_to is not None:
            num_img, num_txt, num_dummies = _missing((sum(img_lens), sum(txt_lens), len(grids)), fill_to)
            zeros = [0] * num_dummies
            img_lens += [num_img, *zeros[1:]]
            all_txt_lens += [num_txt, *zeros[1:]]
            target_lens, txt_starts = target_lens + zeros, txt_starts + zeros
            img_positions.append(torch.zeros(num_img, 3, dtype=torch.int64))
        txt_positions = torch.cat([torch.arange(s, s + n) for s, n in zip(txt_starts, all_txt_lens, strict=True)])

        img_starts, txt_offsets = _starts(img_lens), _starts(all_txt_lens)
        num_txt = sum(all_txt_lens)
        samples = torch.arange(len(img_lens))
        by_length = sorted(samples.tolist(), key=lambda b: (all_txt_lens[b] + img_lens[b], b))
        pieces = []
        for b in by_length:
            pieces.append(torch.arange(txt_offsets[b], txt_offsets[b] + all_txt_lens[b]))
            pieces.append(torch.arange(img_starts[b], img_starts[b] + img_lens[b]) + num_txt)
        joint_order = torch.cat(pieces)
        lengths = [all_txt_lens[b] + img_lens[b] for b in by_length]

        img_sample = samples.repeat_interleave(torch.tensor(img_lens))
        within = torch.arange(sum(img_lens)) - torch.tensor(img_starts)[img_sample]
        tensors = dict(
            img_sample=img_sample,
            txt_sample=samples.repeat_interleave(torch.tensor(all_txt_lens)),
            is_reference=within >= torch.tensor(target_lens)[img_sample],
            positions=torch.cat((txt_positions[:, None].expand(-1, 3), *img_positions)),
            joint_order=joint_order,
            joint_inverse=torch.empty_like(joint_order).scatter_(0, joint_order, torch.arange(len(joint_order))),
            cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        )
        return cls(
            num_samples=len(img_lens),
            grids=tuple(tuple(images) for images in grids),
            txt_lens=tuple(txt_lens),
            runs=tuple((lengths.count(n), n) for n in sorted(set(lengths)) if n),
            max_seqlen=max(lengths) if fill_to is None else len(joint_order),
            **{name: tensor.to(device) for name, tensor in tensors.items()},
        )

    def shard(self, num_groups: int, group_size: int, index: int) -> "PackedLayout":
        """Return the layout of one piece of the tokens, for a forward that several ranks share.

        Each stream, filled with up to num_groups · group_size − 1 tokens that belong to no sample, is cut into so many
        equal pieces; piece `index` keeps its part of what is said of single tokens.  Attention still runs over all
        tokens: in joint order the filling is one more segment, and `joint_order` and `positions` refer to the groups
        end to end, each as [its text tokens, its image tokens]; group_size neighbouring pieces make a group.
        `shard_rows` cuts the streams themselves.
        """
        num_pieces, device = num_groups * group_size, self.joint_order.device
        num_txt, num_img = len(self.txt_sample), len(self.img_sample)
        more_txt, more_img = -num_txt % num_pieces, -num_img % num_pieces
        filled_txt, filled_img = num_txt + more_txt, num_img + more_img
        rows = torch.arange(filled_txt + filled_img, device=device)  # of cat(txt, img), filled
        txt_rows, img_rows = rows.split((filled_txt, filled_img))
        by_group = torch.cat((txt_rows.view(num_groups, -1), img_rows.view(num_groups, -1)), dim=1).flatten()
        place = torch.empty_like(by_group).scatter_(0, by_group, rows)
        joint_rows = self.joint_order + more_txt * (self.joint_order >= num_txt)
        joint_order = place[torch.cat((joint_rows, txt_rows[num_txt:], img_rows[num_img:]))]
        positions = self.positions.new_zeros(len(rows), 3)
        positions[torch.cat((txt_rows[:num_txt], img_rows[:num_img]))] = self.positions
        num_more = more_txt + more_img
        return replace(
            self,
            img_sample=shard_rows(self.img_sample, num_pieces, index),
            txt_sample=shard_rows(self.txt_sample, num_pieces, index),
            is_reference=shard_rows(self.is_reference, num_pieces, index),
            positions=positions[by_group],
            joint_order=joint_order,
            joint_inverse=torch.empty_like(joint_order).scatter_(0, joint_order, rows),
            cu_seqlens=torch.cat((self.cu_seqlens, self.cu_seqlens[-1:] + num_more)) if num_more else self.cu_seqlens,
            runs=(*self.runs, (1, num_more)) if num_more else self.runs,
            max_seqlen=max(self.max_seqlen, num_more),
        )

    @property
    def img_lens(self) -> list[int]:
        """Image tokens of each sample, references included; without the filler's."""
        return [sum(f * h * w for f, h, w in images) for images in self.grids]

    @property
    def num_filler_tokens(self) -> int:
        """How many of the L tokens belong to no sample."""
        return len(self.joint_order) - sum(self.img_lens) - sum(self.txt_lens)

    @cached_property
    def img_membership(self) -> Tensor:
        """(B, I) float32: 1 where the image token belongs to the sample."""
        samples = torch.arange(self.num_samples, device=self.img_sample.device)
        return (samples[:, None] == self.img_sample).float()

    @cached_property
    def txt_membership(self) -> Tensor:
        """(B, T) float32: 1 where the text token belongs to the sample."""
        samples = torch.arange(self.num_samples, device=self.txt_sample.device)
        return (samples[:, None] == self.txt_sample).float()

    @cached_property
    def target_mean(self) -> Tensor:
        """(B, I) float32: 1 / (target tokens of the sample) on its target tokens, 0 elsewhere."""
        targets = self.img_membership * ~self.is_reference
        return targets / targets.sum(dim=1, keepdim=True).clamp(min=1)  # a filler has none


def fill_batch(
    batch: Batch,
    fill_to: Sequence[tuple[int, int, int]] | None,
    img: Sequence[str],
    txt: Sequence[str],
    sample: Sequence[str],
) -> Batch:
    """Return a micro-batch with its layout filled to a size (I, T, B), and zeros in the new rows of its tensors.

    batch: a dataclass with a `layout`; img, txt, sample: the names of its tensors by what their rows stand for.  Zero
    is a legal value of each: weight, time, language, latent.
    fill_to: sizes, of which the first that holds the micro-batch is taken; with None the batch comes back as it is.
    Raises: ValueError if the batch is above all of them.
    """
    if fill_to is None:
        return batch
    layout = batch.layout
    needed = sum(layout.img_lens), sum(layout.txt_lens), layout.num_samples + 1
    holding = (size for size in fill_to if all(n <= most for n, most in zip(needed, size, strict=True)))
    size = next(holding, fill_to[-1])
    layout = PackedLayout.build(layout.grids, layout.txt_lens, layout.img_sample.device, size)
    filled = {}
    for names, num_rows in zip((img, txt, sample), size, strict=True):
        for name in names:
            rows = getattr(batch, name)
            filled[name] = torch.cat((rows, rows.new_zeros(num_rows - len(rows), *rows.shape[1:])))
    return replace(batch, layout=layout, **filled)


def _missing(sizes: tuple[int, int, int], fill_to: tuple[int, int, int]) -> tuple[int, ...]:
    """Return how many image tokens, text tokens and samples are to be added."""
    missing = tuple(wanted - size for size, wanted in zip(sizes, fill_to, strict=True))
    if min(missing) < 0 or missing[2] < 1:
        raise ValueError(
            f"a micro-batch of {sizes} (image tokens, text tokens, samples) cannot be filled to {fill_to}; the filler "
            "is one sample at least"
        )
    return missing


def shard_rows(x: Tensor, num_pieces: int, index: int) -> Tensor:
    """Return piece `index` of the rows of a stream (n, …), filled with zeros to equal pieces."""
    more = -len(x) % num_pieces
    if more:
        x = torch.cat((x, x.new_zeros(more, *x.shape[1:])))
    return x.chunk(num_pieces)[index]


def _starts(lengths: Sequence[int]) -> list[int]:
    """Return where each piece starts when pieces of these lengths lie end to end."""
    return [0, *torch.tensor(lengths).cumsum(0)[:-1].tolist()]


def _image_positions(index: int, grid: Grid) -> Tensor:
    """Return the (frames · rows · columns, 3) rotary positions of a sample's image number `index`.

    Rows and columns are centred on the image; frames count up from the image's index.
    Source: `diffusers` QwenEmbedRope._compute_video_freqs with scale_rope.
    """
    frames, rows, columns = grid
    axes = (
        torch.arange(index, index + frames),
        torch.arange(rows) - (rows - rows // 2),
        torch.arange(columns) - (columns - columns // 2),
    )
    return torch.cartesian_prod(*axes).view(-1, 3)
