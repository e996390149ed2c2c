"""Damaged checkpoints: whatever became of a file is caught before a tensor changes, and the step before is used."""

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from parallel import checkpoint
from parallel.commit_record import RECORD
from tests.spawn import run_ranks

FILES = (RECORD, "index.json", "rank-00000-00000.bin", "rank-00001-00000.bin")


def tensors_of(step: int) -> dict[str, torch.Tensor]:
    return {
        "model.a": torch.arange(12.0).view(3, 4) + 100 * step,
        "model.b": torch.full((5,), step),
        "optimizer.a.step": torch.tensor(float(step)),
        "rank0.c": torch.full((4, 4), 1.5 + step).bfloat16(),
        "rank1.d": torch.full((4, 4), 2.5 + step).bfloat16(),  # the ranks' files have the same size
        "other": torch.arange(8, dtype=torch.uint8) + step,
        "more": torch.full((2, 2), float(step)),
    }


def save_steps(rank: int, num_ranks: int, folder: Path) -> None:
    for step in (1, 2):
        own = {n: t for n, t in tensors_of(step).items() if not n.startswith("rank") or n.startswith(f"rank{rank}.")}
        checkpoint.save(folder, step, own, {"step": step})


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    """A folder with steps 1 and 2, saved by two ranks."""
    folder = tmp_path_factory.mktemp("pristine")
    run_ranks(save_steps, 2, folder)
    assert all({file.name for file in step.iterdir()} == set(FILES) for step in folder.iterdir())
    return folder


def changed(path: Path, change: Callable[[bytearray], object]) -> None:
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)


def damages(pristine: Path, flips_per_file: int) -> Iterator[tuple[str, Callable[[Path], object]]]:
    """Yield (description, function that damages the folder of a step); flips_per_file: 0 = every bit of every byte."""
    for file in FILES:
        size = (pristine / "step-00000002" / file).stat().st_size
        bits = range(8 * size)
        for i, at in enumerate(bits if not flips_per_file else bits[:: max(1, len(bits) // flips_per_file)]):
            # A number that is prime to 8 takes the bits in turn.
            at = at if not flips_per_file else min(at + i % 8, 8 * size - 1)

            def flip(content: bytearray, at=at) -> None:
                content[at // 8] ^= 1 << at % 8

            yield f"bit {at} of {file}", lambda step, file=file, flip=flip: changed(step / file, flip)
        for length in {0, 1, size // 2, size - 1}:
            yield f"{file} cut to {length}", lambda step, file=file, length=length: os.truncate(step / file, length)
        half = size // 2
        for name, change in {
            "grown": lambda content: content.append(0),
            "zeroed": lambda content: content.__setitem__(slice(None), bytes(len(content))),
            "with a hole": lambda content, half=half: content.__setitem__(slice(half, half + 8), bytes(8)),
            "without a byte": lambda content, half=half: content.pop(half),
            "with a byte twice": lambda content, half=half: content.insert(half, content[half]),
            "with two bytes swapped": lambda content: content.__setitem__(slice(0, 2), content[1::-1]),
            "turned round": lambda content: content.reverse(),
        }.items():
            if name == "with two bytes swapped" and file.endswith(".bin"):
                continue  # in these files the first two may be the same
            yield f"{file} {name}", lambda step, file=file, change=change: changed(step / file, change)
        yield f"{file} missing", lambda step, file=file: (step / file).unlink()
        yield f"{file} a folder", lambda step, file=file: ((step / file).unlink(), (step / file).mkdir())
        yield (
            f"{file} a broken link",
            lambda step, file=file: (
                (step / file).unlink(),
                (step / file).symlink_to("nowhere"),
            ),
        )
        yield f"{file} of another step", lambda step, file=file: shutil.copy(pristine / "step-00000001" / file, step)
        yield f"{file} under another name", lambda step, file=file: (step / file).rename(step / f"{file}.old")
        yield f"{file} twice", lambda step, file=file: shutil.copy(step / file, step / f"{file}.copy")
        for other in FILES:
            if other != file:
                yield f"{other} as {file}", lambda step, file=file, other=other: shutil.copy(step / other, step / file)

    def swap_ranks(step: Path) -> None:
        (step / FILES[2]).rename(step / "x")
        (step / FILES[3]).rename(step / FILES[2])
        (step / "x").rename(step / FILES[3])

    yield "ranks swapped", swap_ranks
    yield "an extra file", lambda step: (step / "rank-00002-00000.bin").write_bytes(b"")
    yield "an extra folder", lambda step: (step / "folder").mkdir()
    yield "all but the record gone", lambda step: [(step / file).unlink() for file in FILES[1:]]
    yield "another step's files", lambda step: [shutil.copy(pristine / "step-00000001" / f, step) for f in FILES[1:]]
    yield (
        "another step's whole folder",
        lambda step: shutil.copytree(pristine / "step-00000001", step, dirs_exist_ok=True),
    )


def check_each(pristine: Path, folder: Path, flips_per_file: int, caplog) -> int:
    """Assert that every damage is caught and named, no tensor changes, and step 1 is used; return how many."""
    cases, step = 0, folder / "step-00000002"
    shutil.copytree(pristine, folder)
    for description, damage in damages(pristine, flips_per_file):
        damage(step)
        tensors = tensors_of(7)
        with pytest.raises(ValueError, match="not a valid checkpoint"):
            checkpoint.load(folder, 2, tensors)
        with pytest.raises(ValueError, match="not a valid checkpoint"):
            checkpoint.StoredTensors(folder, 2)
        assert all(torch.equal(tensors[name], tensors_of(7)[name]) for name in tensors), description
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert checkpoint.load_latest(folder, tensors) == (1, {"step": 1}), description
        assert all(torch.equal(tensors[name], tensors_of(1)[name]) for name in tensors), description
        assert "skipping damaged checkpoint" in caplog.text and "step-00000002" in caplog.text
        cases += 1
        shutil.rmtree(step)
        shutil.copytree(pristine / step.name, step)
    tensors = tensors_of(7)
    assert checkpoint.load_latest(folder, tensors) == (2, {"step": 2})  # undamaged it loads
    assert all(torch.equal(tensors[name], tensors_of(2)[name]) for name in tensors)
    return cases


def test_every_kind_of_damage_is_caught_before_a_tensor_changes(pristine, tmp_path, caplog):
    assert check_each(pristine, tmp_path / "damaged", 120, caplog) >= 500


@pytest.mark.exhaustive
def test_every_bit_of_every_file(pristine, tmp_path, caplog):
    num_bits = sum(8 * file.stat().st_size for file in (pristine / "step-00000002").iterdir())
    assert check_each(pristine, tmp_path / "damaged", 0, caplog) > num_bits
