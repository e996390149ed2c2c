"""Which part of a full tensor this rank holds."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard


def local_slice(tensor: Tensor) -> tuple[slice, ...]:
    """Return the box of the full tensor that this rank holds, one slice a dimension (some may be empty).

    Along a dimension that both axes cut, tensor parallelism cuts first, and FSDP cuts the piece that it left.  Each cut
    is into chunks of ceil(size / ranks): the last ones may be shorter or empty.  A plain tensor is its own box.
    """
    box = [slice(0, size) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
        assert coordinate is not None, "this rank is not part of the tensor's mesh"
        for axis in _cutting_order(tensor):
            dim = tensor.placements[axis].dim
            box[dim] = _chunk(box[dim], mesh.size(axis), coordinate[axis])
        assert tuple(s.stop - s.start for s in box) == tensor._local_tensor.shape, (box, tensor._spec)
    return tuple(box)


def num_shards(tensor: Tensor) -> int:
    """Return the number of different boxes that the full tensor is cut into; 1 for a plain or replicated tensor."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = (tensor.device_mesh.size(axis) for axis, p in enumerate(tensor.placements) if not isinstance(p, Replicate))
    return torch.Size(sizes).numel()


def _cutting_order(tensor: DTensor) -> list[int]:
    """Return the mesh axes that cut the tensor, those that cut first in front."""
    # FSDP marks its cut of an already cut dimension as strided; it was made after the plain ones.
    cuts = [axis for axis, placement in enumerate(tensor.placements) if hasattr(placement, "dim")]
    return sorted(cuts, key=lambda axis: type(tensor.placements[axis]) is not Shard)


def _chunk(part: slice, num_chunks: int, index: int) -> slice:
    """Return chunk `index` of a range, as torch.chunk would cut it."""
    size = -(-(part.stop - part.start) // num_chunks)
    start = min(part.start + index * size, part.stop)
    return slice(start, min(start + size, part.stop))
