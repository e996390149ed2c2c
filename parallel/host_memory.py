"""Host memory that a checkpoint is copied to: kept from save to save, shared with a writer process, pinned for GPUs."""

import mmap
import os
import tempfile

import torch
from torch import Tensor


class HostMemory:
    """One block of memory without a name: nothing is left of it when its processes are gone, however they end.

    fd: the file that it is.  view: its bytes.
    """

    def __init__(self, num_bytes: int, pin: bool):
        """Allocate; the pages are there at once, so the first copy is as fast as the later ones.

        pin: have CUDA copy to it without a detour.
        Raises: ValueError if there is no room for it.
        """
        size = max(1, num_bytes)
        try:
            # A memfd is shared memory whatever /dev/shm allows; systems without it get a deleted file.
            self.fd = os.memfd_create("checkpoint") if hasattr(os, "memfd_create") else _deleted_file()
            os.ftruncate(self.fd, size)
            self._map = mmap.mmap(self.fd, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        except OSError as error:
            raise ValueError(
                f"no room for {num_bytes / 2**30:.2f} GiB of host memory to copy a checkpoint to ({error}); save "
                "without a background writer (--checkpoint_async none)"
            ) from error
        self.num_bytes, self.view = num_bytes, memoryview(self._map)
        self._tensor, self._is_pinned = torch.frombuffer(self._map, dtype=torch.uint8), False
        if pin:
            failure = torch.cuda.cudart().cudaHostRegister(self._tensor.data_ptr(), size, 0)
            self._is_pinned = int(failure) == 0  # without it copies are slower, and right

    def tensor(self, start: int, like: Tensor) -> Tensor:
        """Return a part of the memory, from byte `start` on, as a contiguous tensor of another's shape and dtype."""
        num_bytes = like.numel() * like.element_size()
        return self._tensor[start : start + num_bytes].view(like.dtype).view(like.shape)

    def close(self) -> None:
        """Give the memory back.  Tensors that it gave out must not be used any more."""
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self._tensor.data_ptr())
        self.view.release()
        del self._tensor, self._map  # unmapped when the last tensor made from it is gone
        os.close(self.fd)


def _deleted_file() -> int:
    descriptor, path = tempfile.mkstemp()
    os.unlink(path)
    return descriptor
