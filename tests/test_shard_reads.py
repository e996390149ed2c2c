"""Any box of any tensor arrives exactly, in reads of bounded size, without a byte too many."""

import pytest
import torch

from parallel.safetensors_files import StoredFile, StoredTensor
from parallel.shard_reads import plan_reads, run_reads, shard_rows
from utils.byte_source import LocalFile, open_source


def random_boxes(shape, random, count):
    for _ in range(count):
        ends = [sorted(torch.randint(0, size + 1, (2,), generator=random).tolist()) for size in shape]
        yield tuple(slice(a, b) for a, b in ends)


@pytest.mark.parametrize("shape", [(), (1,), (13,), (6, 5), (1, 7), (4, 3, 5), (2, 3, 4, 3)])
@pytest.mark.parametrize("request_bytes, cheap_gap", [(8, 0), (64, 16), (10**6, 10**6), (24, 10**6)])
def test_any_box_at_any_offset(tmp_path, monkeypatch, shape, request_bytes, cheap_gap):
    read, before = [], LocalFile.read_into

    def noting(self, offset, buffer):
        read.append(len(buffer))
        before(self, offset, buffer)

    monkeypatch.setattr(LocalFile, "request_bytes", request_bytes)
    monkeypatch.setattr(LocalFile, "cheap_gap", cheap_gap)
    monkeypatch.setattr(LocalFile, "read_into", noting)
    random = torch.Generator().manual_seed(1)
    path, content, at, entries = tmp_path / "raw", b"", 0, []
    for i, dtype in enumerate((torch.bfloat16, torch.uint8, torch.float32)):
        values = torch.randint(0, 256, shape, generator=random).to(dtype)
        content += b"?" * i + values.reshape(-1).view(torch.uint8).numpy().tobytes()  # at odd offsets
        entries.append((at + i, dtype, values))
        at = len(content)
    path.write_bytes(content)
    file = StoredFile(str(path), len(content), None)
    source = open_source(path)
    for boxes in zip(*(random_boxes(shape, random, 8) for _ in entries), strict=True):
        for converted in (False, True):
            rows, wanted = [], []
            for (offset, dtype, values), box in zip(entries, boxes, strict=True):
                target = torch.empty(values[box].shape, dtype=torch.float64 if converted else dtype)
                rows += shard_rows(StoredTensor(file, offset, shape, dtype), target, box)
                wanted.append((target, values[box]))
            read.clear()
            num_bytes = run_reads((source, group) for group in plan_reads(rows, source))
            assert num_bytes == sum(read) and max(read, default=0) <= request_bytes
            assert all(torch.equal(target, values.to(target.dtype)) for target, values in wanted)
            if not cheap_gap:  # not one byte too many
                assert num_bytes == sum(values.nbytes for _, values in wanted)
    source.close()
