"""Encoded shards train as raw ones do: same samples, same noise, same loss; others are refused."""

import dataclasses
import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

import train_mmdit
from data.captions import parse_captions
from data.encoded import EncodedMember, fitting_size, write_encoded
from data.index import build_index
from data.loader import Loader
from data.order import GlobalOrder
from data.plan import BatchPlan, every_language
from data.reader import Reader
from model.encoder_identity import folder_identity
from model.encoders import Encoders
from model.mmdit import MMDiT, MMDiTConfig
from tests.script_runs import run_script
from tests.shards import simple_samples, write_shard
from tools.prepare_encode import MemberEncoder, encode_shards

TINY = "assets/tiny"
LONG = "a very long caption about many things " * 4  # captions of mixed lengths share micro-batches
SAMPLES = [
    sample | {"captions": {"en": [f"{LONG}{i}"], "zh": [f"{'长长的一句话，' * 20}{i}"]}} if i % 3 == 0 else sample
    for i, sample in enumerate(simple_samples(10))
]


@pytest.fixture(scope="module")
def encoders():
    return Encoders(TINY, torch.device("cpu"))


def index_of(shards, encoders, folder):
    return build_index(
        [str(shard) for shard in shards], encoders.text.count_tokens, encoders.text.tokenizer_id, folder / "cache"
    )


@pytest.fixture(scope="module")
def raw(encoders, tmp_path_factory):
    folder = tmp_path_factory.mktemp("raw")
    shards = [write_shard(folder / "a.tar", SAMPLES[:6]), write_shard(folder / "b.tar", SAMPLES[6:])]
    return index_of(shards, encoders, folder)


@pytest.fixture(scope="module")
def coded(encoders, raw, tmp_path_factory):
    """Return {dtype of the store: index of the encoded shards}."""
    indices = {}
    for dtype in (torch.float32, torch.bfloat16):
        folder = tmp_path_factory.mktemp(str(dtype))
        assert encode_shards(raw, MemberEncoder(encoders, dtype), folder / "out", [64 * 64]) == (10, 0)
        indices[dtype] = index_of(sorted((folder / "out").glob("*.tar")), encoders, folder)
    return indices


def losses(index, encoders, steps=3):
    """Return the network's loss of every sample of some steps, by (step, key, caption)."""
    model = MMDiT(MMDiTConfig.from_folder(f"{TINY}/transformer"))
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():  # as drawn for training it would say zero, whatever it sees
            parameter.copy_(0.08 * torch.randn(parameter.shape, generator=random))
    cfg = train_mmdit.Config(model=TINY, global_batch_size=8, sample_posterior=True)
    plan = BatchPlan(
        index, GlobalOrder(len(index), 8, cfg.seed), num_ranks=1, rank=0, max_tokens=220, seed=0,
        num_empty_tokens=encoders.text.count_tokens(""), caption_dropout=0.3,
    )  # fmt: skip
    loader, found = Loader(Reader(index), plan, 0, 0), {}
    for step in range(steps):
        for samples in loader.next_step():
            batch = train_mmdit.make_batch(samples, encoders, cfg)
            with torch.no_grad():
                values = train_mmdit.sample_losses(model, batch, cfg)
            for sample, value in zip(samples, values.tolist(), strict=True):
                found[step, sample.plan.epoch, sample.key, sample.plan.language, sample.caption] = value
    return found


@pytest.fixture(scope="module")
def online(raw, encoders):
    return losses(raw, encoders)


def test_float32_gives_the_same_losses_to_the_bit(encoders, online, coded):
    assert losses(coded[torch.float32], encoders) == online
    assert len(set(online.values())) == len(online) == 24  # every sample has a loss of its own
    assert sum(key[-1] == "" for key in online) >= 3 and sum(len(key[-1]) > 100 for key in online) >= 3


def test_bfloat16_gives_nearly_the_same_losses(encoders, online, coded):
    stored = losses(coded[torch.bfloat16], encoders)
    assert stored.keys() == online.keys() and stored != online
    off = [abs(stored[key] / online[key] - 1) for key in online]
    assert max(off) < 1e-3 and sum(off) / len(off) < 3e-4, (max(off), sum(off) / len(off))


def test_the_encoders_are_not_even_called(raw, online, coded):
    idle = Encoders(TINY, torch.device("cpu"))
    idle.vae = NoEncoder()
    idle.text.encode = NoEncoder()
    assert losses(coded[torch.float32], idle, steps=1).items() <= online.items()
    with pytest.raises(AssertionError, match="an encoder was asked"):
        losses(raw, idle, steps=1)


def test_raw_and_encoded_shards_mix(encoders, raw, online, coded, tmp_path):
    mixed = build_index(
        [raw.shards[0], coded[torch.float32].shards[1]], encoders.text.count_tokens, encoders.text.tokenizer_id,
        tmp_path,
    )  # fmt: skip
    assert losses(mixed, encoders) == online


def test_the_index_of_encoded_shards_is_that_of_the_raw_ones(raw, coded):
    for i in range(len(raw)):
        ours, theirs = coded[torch.bfloat16][i], raw[i]
        for name in ("key", "height", "width", "group", "caption_tokens", "meta_size", "meta_crc32"):
            assert getattr(ours, name) == getattr(theirs, name), name
        assert ours.encoded_sizes == ((theirs.height, theirs.width),) and theirs.encoded_sizes == ()
    reader = Reader(coded[torch.bfloat16])
    with pytest.raises(ValueError, match="it is encoded"):
        reader.read_pixels(0)


class NoEncoder:
    """In place of the encoders' networks: to call it is an error."""

    def __getattr__(self, name):
        raise AssertionError(f"an encoder was asked for {name}")

    def __call__(self, *_):
        raise AssertionError("an encoder was asked")


def test_what_is_written_is_what_the_encoders_say(encoders, raw, coded):
    reader = Reader(coded[torch.float32])
    for i in (0, 3, 7):
        for planned in every_language(raw, i):
            sample = reader.read(planned)
            mean, std = encoders.encode_picture(Reader(raw).read_pixels(i))
            assert torch.equal(sample.latents[0], mean) and torch.equal(sample.latents[1], std)
            assert torch.equal(sample.states, encoders.text.encode(sample.caption))
            dropped = reader.read(dataclasses.replace(planned, drop_caption=True))
            assert dropped.caption == "" and torch.equal(dropped.states, encoders.text.encode(""))


def test_several_sizes_and_the_one_that_is_trained(encoders, tmp_path):
    samples = [{"key": "p", "height": 96, "width": 144, "captions": {"en": ["dog"]}}]
    raw = index_of([write_shard(tmp_path / "a.tar", samples)], encoders, tmp_path)
    encode_shards(raw, MemberEncoder(encoders, torch.float32), tmp_path / "out", [96 * 144, 48 * 64, 64 * 96])
    index = index_of([tmp_path / "out" / "a.tar"], encoders, tmp_path)
    assert index[0].encoded_sizes == ((32, 64), (64, 96), (96, 144)) and (index[0].height, index[0].width) == (96, 144)
    for max_pixels, size in ((10**6, (96, 144)), (96 * 144 - 1, (64, 96)), (32 * 64, (32, 64))):
        planned = every_language(index, 0, max_pixels)[0]
        assert (planned.height, planned.width) == size and planned.num_image_tokens == size[0] * size[1] // 256
        online = encoders.encode_picture(Reader(raw, {32: 48 * 64}.get(size[0], math.prod(size))).read_pixels(0))
        mean, std = Reader(index, max_pixels).read(planned).latents
        assert mean.shape == (16, size[0] // 8, size[1] // 8)
        assert torch.equal(mean, online[0]) and torch.equal(std, online[1])
    with pytest.raises(ValueError, match="32 x 64.*--max_pixels allows 1000"):
        every_language(index, 0, 1000)


def test_shards_of_other_encoders_are_refused(encoders, raw, coded, tmp_path):
    coded[torch.bfloat16].check_encoded_by(encoders.identity)
    raw.check_encoded_by("anything")
    other = tmp_path / "other"
    shutil.copytree(TINY, other)
    path = other / "vae" / "diffusion_pytorch_model.safetensors"
    weights = safetensors.torch.load_file(path)
    name = max(weights, key=lambda name: weights[name].numel())
    weights[name] *= 1.01  # as one step of fine-tuning would
    safetensors.torch.save_file(weights, path)
    changed = Encoders(other, torch.device("cpu"))
    with pytest.raises(ValueError, match="a.tar was encoded by vae .*, --model has vae .*encode the raw shards again"):
        coded[torch.bfloat16].check_encoded_by(changed.identity)
    begun = Path(coded[torch.bfloat16].shards[0]).parent
    with pytest.raises(ValueError, match="begun with another encoded_by"):
        encode_shards(raw, MemberEncoder(changed), begun, [4096])
    with pytest.raises(ValueError, match="begun with another max_pixels and store"):
        encode_shards(raw, MemberEncoder(encoders, torch.float32), begun, [4097])


def test_the_identity_is_of_the_weights_not_of_their_files(tmp_path):
    source = f"{TINY}/vae"
    shutil.copytree(source, tmp_path / "cut")
    weights = safetensors.torch.load_file(f"{source}/diffusion_pytorch_model.safetensors")
    (tmp_path / "cut" / "diffusion_pytorch_model.safetensors").unlink()
    names = sorted(weights)
    for part, chosen in (("1", names[::2]), ("2", names[1::2])):
        safetensors.torch.save_file({n: weights[n] for n in chosen}, tmp_path / "cut" / f"part-{part}.safetensors")
    config = json.loads((tmp_path / "cut" / "config.json").read_text())
    (tmp_path / "cut" / "config.json").write_text(json.dumps(config | {"_diffusers_version": "9"}))
    assert folder_identity(tmp_path / "cut") == folder_identity(source)
    (tmp_path / "cut" / "config.json").write_text(json.dumps(config | {"latents_mean": [0.0] * 16}))
    assert folder_identity(tmp_path / "cut") != folder_identity(source)
    with pytest.raises(ValueError, match="config.json"):
        folder_identity(tmp_path)


def member(**changed):
    size = (32, 48)
    parts = {
        "latents": {size: (torch.zeros(16, 4, 6), torch.ones(16, 4, 6))}, "states": {"en": [torch.zeros(7, 128)]},
        "empty": torch.zeros(5, 128), "encoded_by": "me",
    } | changed  # fmt: skip
    return write_encoded(**parts)


def test_a_sound_member_and_every_cut_and_flip_of_its_header():
    data = member()
    whole = EncodedMember(data)
    assert whole.sizes == [(32, 48)] and whole.encoded_by == "me" and whole.count_tokens(["en"]) == [7]
    with pytest.raises(ValueError, match="no text.en.1"):
        whole.count_tokens(["en", "en"])
    with pytest.raises(ValueError, match="no mean.64x64"):
        whole.latents((64, 64))
    header = 8 + int.from_bytes(data[:8], "little")
    for cut in [*range(0, header, 7), header, len(data) - 1]:
        with pytest.raises(ValueError, match="safetensors"):
            EncodedMember(data[:cut])
    random = np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(data)
        damaged[random.integers(header)] ^= 1 << int(random.integers(8))
        try:
            sound = EncodedMember(bytes(damaged))
            sound.count_tokens(["en"]), sound.latents(sound.sizes[0]), sound.empty_states()
        except ValueError:
            pass


def test_a_foreign_safetensors_file_is_left_out_with_the_reason(encoders, tmp_path):
    foreign = safetensors.torch.save({"weight": torch.zeros(3)})
    other = safetensors.torch.save({"weight": torch.zeros(3)}, {"format": "pt"})
    caption = b'{"caption": "dog"}'
    samples = [
        {"key": name, "members": {"safetensors": content, "json": caption}}
        for name, content in (("a", foreign), ("b", other), ("c", b"hello"), ("d", member()), ("e", member(states={})))
    ]
    index = index_of([write_shard(tmp_path / "a.tar", samples)], encoders, tmp_path)
    assert [index.key(i) for i in range(len(index))] == ["a.tar/d"]
    reasons = dict(index.rejects)
    assert "not a sound encoded sample" in reasons["a.tar/a"] and "not a sound" in reasons["a.tar/c"]
    assert "0 sizes" in reasons["a.tar/b"] and "no text.en.0" in reasons["a.tar/e"]


def test_a_damaged_encoded_sample_is_replaced(encoders, coded, tmp_path):
    source = coded[torch.float32].shards[0]
    shutil.copy(source, tmp_path / "a.tar")
    index = index_of([tmp_path / "a.tar"], encoders, tmp_path)
    record = index[2]
    with open(tmp_path / "a.tar", "r+b") as file:
        file.seek(record.image_offset + record.image_size - 5)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    reader = Reader(index)
    sample = reader.read(every_language(index, 2)[0])
    assert sample.key != "a.tar/s002" and list(reader.bad_samples) == ["a.tar/s002"]


def test_an_interrupted_run_goes_on(encoders, raw, coded, tmp_path):
    encoder = MemberEncoder(encoders)
    assert encode_shards(raw, encoder, tmp_path / "out", [4096], first=1, stride=2) == (4, 0)  # the second rank of two
    before = (tmp_path / "out" / "b.tar").read_bytes()
    assert encode_shards(raw, encoder, tmp_path / "out", [4096]) == (6, 0)
    assert (tmp_path / "out" / "b.tar").read_bytes() == before
    for shard in coded[torch.bfloat16].shards:  # by one process without a stop
        assert Path(shard).read_bytes() == (tmp_path / "out" / Path(shard).name).read_bytes()
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["a.tar", "b.tar", "encoded.json"]


def test_the_writer_of_prepare(encoders, raw):
    """What tools.prepare hands over: pictures, captions, a key and a .json."""
    reader = Reader(raw)
    pixels = reader.read_pixels(1).permute(1, 2, 0).numpy()

    @dataclasses.dataclass
    class Picture:
        image: Image.Image

    class Prepared:
        edit = None
        pictures = [Picture(Image.fromarray(pixels))]
        captions, _ = parse_captions("json", reader.read_meta(1))

        def key(self, picture):
            return "0001"

        def meta_of(self, picture):
            return b"{}"

    [(key, members)] = MemberEncoder(encoders, torch.float32).encode_members(Prepared(), None)
    assert key == "0001" and members["json"] == b"{}"
    written = EncodedMember(members["safetensors"])
    assert torch.equal(written.latents((32, 64))[0], encoders.encode_picture(reader.read_pixels(1))[0])
    assert torch.equal(written.states("zh", 0), encoders.text.encode("东西1"))


def test_fitting_sizes():
    sizes = [(640, 640), (256, 256), (1328, 1328)]
    assert fitting_size(sizes, 640 * 640) == (640, 640) and fitting_size(sizes, 10**9) == (1328, 1328)


def test_a_run_on_encoded_shards_alone_does_without_the_text_encoder(raw, coded, tmp_path):
    """Losses and sample pictures are those of a run on the raw shards, to the bit; and the log says what is saved."""
    flags = [
        "--num_steps", "1", "--global_batch_size", "8", "--max_tokens_per_micro_batch", "2000", "--eval_every", "1",
        "--eval_samples", "2", "--save_every", "0", "--log_every", "1", "--sample_prompts", "狗脸", "a dog",
        "--sample_steps", "1", "--cache_folder", str(tmp_path / "cache"),
    ]  # fmt: skip
    losses_of, pictures, left_out = {}, {}, {}
    runs = (("raw", raw, "1"), ("coded", coded[torch.float32], "1"), ("no samples", coded[torch.float32], "0"))
    for name, index, sample_every in runs:
        data = ["--data", str(Path(index.shards[0]).parent), "--run_folder", str(tmp_path / name)]
        code, printed = run_script("train_mmdit.py", [*flags, *data, "--sample_every", sample_every])
        assert code == 0, printed
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        losses_of[name] = [{key: value for key, value in line.items() if "loss" in key} for line in lines]
        pictures[name] = {path.name: path.read_bytes() for path in (tmp_path / name / "samples").glob("*.png")}
        left_out[name] = re.findall(r"all samples are encoded: (.*) \(0\.0", printed)
    assert [set(line) & {"loss", "val_loss"} for line in losses_of["raw"]].count({"val_loss"}) == 2
    assert losses_of["raw"] == losses_of["coded"] == losses_of["no samples"]
    assert len(pictures["raw"]) == 2 and pictures["raw"] == pictures["coded"]
    assert left_out == {"raw": [], "coded": ["text_encoder"], "no samples": ["text_encoder and vae"]}
