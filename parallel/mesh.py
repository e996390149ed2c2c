"""The device mesh: which ranks hold copies, which hold shards, which work on one sample together."""

import math
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

AXES = ("dp_replicate", "dp_shard", "cp", "tp")


def build_mesh(device_type: str, dp_replicate: int = 1, dp_shard: int = -1, cp: int = 1, tp: int = 1) -> DeviceMesh:
    """Arrange all ranks in a mesh with the axes dp_replicate, dp_shard, cp and tp; tp varies fastest.

    dp_replicate: copies of the sharded model (HSDP); dp_shard: FSDP shards; cp: ranks that share out the tokens of the
    same samples, and are FSDP shards as well; tp: tensor parallel.
    One of the sizes may be -1: what the others leave.
    Raises: ValueError if the sizes do not multiply to the number of ranks.
    """
    sizes = dict(zip(AXES, (dp_replicate, dp_shard, cp, tp), strict=True))
    if any(size < 1 and size != -1 for size in sizes.values()) or list(sizes.values()).count(-1) > 1:
        raise ValueError(f"mesh sizes must be positive, and at most one of them -1 (what is left), got {sizes}")
    num_ranks = dist.get_world_size()
    given = math.prod(size for size in sizes.values() if size != -1)
    sizes = {axis: num_ranks // given if size == -1 else size for axis, size in sizes.items()}
    if math.prod(sizes.values()) != num_ranks:
        flags = " × ".join(f"--{axis} {size}" for axis, size in sizes.items() if size != 1) or "a mesh of 1"
        raise ValueError(
            f"{flags} does not make the {num_ranks} ranks of this job; start another number of processes, or change "
            "the sizes (-1 for one of them takes what is left)"
        )
    mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=AXES)
    # Groups are made with the help of rank 0, which must not leave before all are: the others would die of it, with
    # pages of a library's stacks beside the error that all ranks are about to find.
    dist.barrier()
    return mesh


def check_heads(mesh: DeviceMesh, num_heads: int) -> None:
    """Raises: ValueError if cp and tp cannot share out the attention heads."""
    cp, tp = mesh["cp"].size(), mesh["tp"].size()
    if num_heads % (cp * tp):
        raise ValueError(f"--cp {cp} × --tp {tp} does not divide the model's {num_heads} attention heads")


def weights_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that weights are cut over: cp ranks work on the same samples, but as shards they are like others.

    The same ranks and axes, with cp folded into dp_shard.
    """
    dp_replicate, dp_shard, cp, tp = mesh.shape
    if cp == 1:
        return mesh
    return init_device_mesh(mesh.device_type, (dp_replicate, dp_shard * cp, 1, tp), mesh_dim_names=AXES)


def data_parallel(mesh: DeviceMesh) -> tuple[int, int]:
    """Return (data rank, number of data ranks): ranks with the same data rank work on the same samples."""
    replicate, shard = mesh["dp_replicate"], mesh["dp_shard"]
    return replicate.get_local_rank() * shard.size() + shard.get_local_rank(), replicate.size() * shard.size()


def peers(mesh: DeviceMesh) -> Callable[[object], list] | None:
    """Return a collective that gives what each rank with the same data rank has, in one order; None if there is one."""
    axes = [axis for axis in ("cp", "tp") if mesh[axis].size() > 1]

    def gather(value: object) -> list:
        values = [value]
        for axis in axes:
            lists: list = [None] * mesh[axis].size()
            dist.all_gather_object(lists, values, group=mesh[axis].get_group())
            values = [value for part in lists for value in part]
        return values

    return gather if axes else None
