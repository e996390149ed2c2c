"""The tiny vision tower: its recipe reads as the text encoder does, and what it sees has the names that words have."""

import random
import shutil

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from data.emoji_table import draw_emoji, load_emoji
from model.text_encoder import TextEncoder
from tests.edit_pipeline import TINY, as_tensor
from tools.tiny_reader import TinyReader
from tools.tiny_scenes import random_scene
from tools.tiny_vision import load_with_new_tower, save_vision


@pytest.fixture(scope="module")
def encoder():
    return TextEncoder.from_folder(TINY, torch.device("cpu"), with_vision=True)


@pytest.fixture(scope="module")
def reader(encoder):
    return TinyReader(encoder.vlm, encoder.tokenizer)


def test_the_recipe_reads_as_the_text_encoder_does(encoder, reader):
    texts = ["dog face", "浅蓝色背景上，左边是狗脸，右边是红苹果"]
    for text, states in zip(texts, reader.of_texts(texts), strict=True):
        torch.testing.assert_close(states, F.normalize(encoder.encode(text).mean(0), dim=-1), atol=1e-5, rtol=1e-5)
    rng, emoji = random.Random(0), list(load_emoji().values())
    scenes = [random_scene(rng, emoji) for _ in range(6)]
    assert len({tuple(scene.pixels.shape) for scene in scenes}) > 1
    grids, _, loss = reader.of_pictures([scene.pixels for scene in scenes], ["a dog"] * 6)
    losses = []
    for scene, grid in zip(scenes, grids, strict=True):
        tokens = encoder.edit_tokens("a dog", [tuple(scene.pixels.shape[1:])])
        ids = torch.tensor(tokens.ids[tokens.start :])
        states = encoder.encode("a dog", [scene.pixels])
        torch.testing.assert_close(grid.flatten(0, 1), states[ids == encoder.image_pad], atol=2e-5, rtol=1e-5)
        caption = slice(int((ids == encoder.image_pad).nonzero().max()) + 2, None)
        logits = encoder.vlm.lm_head(states[:-1])[caption.start - 1 :]
        losses.append(F.cross_entropy(logits, ids[caption]))
    torch.testing.assert_close(loss, torch.stack(losses).mean(), atol=1e-4, rtol=1e-4)


def test_only_the_tower_changes(encoder, tmp_path):
    folder = shutil.copytree(TINY, tmp_path / "tiny")
    model = load_with_new_tower(folder, seed=3)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained and trained == {name for name, _ in model.named_parameters() if ".visual." in name}
    save_vision(model, folder)
    before, after = (load_file(f / "text_encoder/model.safetensors") for f in (TINY, folder))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all(name.startswith("visual.") for name in changed)
    other = TextEncoder.from_folder(folder, torch.device("cpu"), with_vision=True)
    assert torch.equal(other.encode("dog face"), encoder.encode("dog face"))
    picture = as_tensor(draw_emoji(load_emoji()["🐶"].key, 96))
    assert not torch.allclose(other.encode("x", [picture]), encoder.encode("x", [picture]), atol=0.1)


def test_pictures_mean_what_their_names_mean(encoder):
    """The nearest name, by mean state, is the right one, in both languages."""
    emoji = [load_emoji()[char] for char in "🐶🍎🚀🎸🍕🌲⚽🔑🐸👑🍋🏠"]
    seen = []
    for thing in emoji:
        picture = as_tensor(draw_emoji(thing.key, 96))
        tokens = encoder.edit_tokens("", [(96, 96)])
        ids = torch.tensor(tokens.ids[tokens.start :])
        seen.append(encoder.encode("", [picture])[ids == encoder.image_pad].mean(0))
    for names in ([e.en for e in emoji], [e.zh for e in emoji]):
        said = torch.stack([encoder.encode(name).mean(0) for name in names])
        similarity = F.normalize(torch.stack(seen), dim=-1) @ F.normalize(said, dim=-1).T
        assert (similarity.argmax(1) == torch.arange(len(emoji))).float().mean() >= 11 / 12
