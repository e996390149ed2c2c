"""Reading tensors' parts from a checkpoint's files, for `torch.distributed.checkpoint`'s loading on any mesh."""

import math
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from parallel.checkpoint_layout import Place, read_index
from parallel.checkpoint_storage import Storage
from utils.byte_source import ByteSource
from utils.checksum import crc32

_THREADS = 4


class CheckpointReader(StorageReader):
    """Reads byte ranges straight into the tensors where these lie in host memory, in one piece."""

    def __init__(self, storage: Storage, name: str, index: bytes):
        """name: the folder of a checkpoint whose files were compared with its record.  index: its index.json."""
        self._storage, self._name = storage, name
        self.metadata = read_index(index)

    def reset(self, checkpoint_id=None) -> None:
        """Do nothing: one reader is for one checkpoint."""

    def read_metadata(self, *args, **kwargs) -> Metadata:
        """Return the table of contents."""
        return self.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args, **kwargs) -> None:
        """Do nothing: all is known."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the plan's tensors.

        Raises: OSError if a file cannot be read, or a part that is read whole no longer matches its checksum.
        """
        items = sorted(plan.items, key=lambda item: (self._place(item).file, self._place(item).start))
        sources: dict[str, ByteSource] = {}
        try:
            for item in items:
                file = self._place(item).file
                sources[file] = sources.get(file) or self._storage.open(self._name, file)

            @torch.no_grad()  # each thread has its own mode, and parts of one parameter are filled by several
            def fill(item: ReadItem) -> None:
                target = planner.resolve_tensor(item).detach()
                self._fill(sources[self._place(item).file], self._place(item), item, target)
                planner.commit_tensor(item, target)

            with ThreadPoolExecutor(_THREADS) as pool:
                for _ in pool.map(fill, items):
                    pass
        finally:
            for source in sources.values():
                source.close()
        done = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id) -> bool:
        """Return that any is right."""
        return True

    def _place(self, item: ReadItem) -> Place:
        return self.metadata.storage_data[item.storage_index]

    def _fill(self, source: ByteSource, place: Place, item: ReadItem, target: Tensor) -> None:
        """Read the rows that are asked for, then take the columns that are."""
        if not target.numel():
            return
        offsets, lengths = list(item.storage_offsets), list(item.lengths)
        shape = list(place.shape)
        if not shape:
            shape, offsets, lengths = [1], [0], [1]
        row_bytes = math.prod(shape[1:]) * place.dtype.itemsize
        shape[0] = lengths[0]
        is_direct = shape == lengths and target.is_contiguous() and target.device.type == "cpu"
        rows = target if is_direct else torch.empty(shape, dtype=place.dtype)
        data = memoryview(rows.reshape(-1).view(torch.uint8).numpy())
        source.read_into(place.start + offsets[0] * row_bytes, data)
        if len(data) == place.num_bytes and crc32(data) != place.crc32:
            raise OSError(f"{self._name}/{place.file} changed while {item.storage_index.fqn} was read from it")
        if not is_direct:
            for dim in range(1, len(shape)):
                rows = rows.narrow(dim, offsets[dim], lengths[dim])
            target.copy_(rows.reshape(target.shape))
