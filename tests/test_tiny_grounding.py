"""The tiny text encoder's last lesson: what is asked, where it has to look, and that it finds things by their names."""

import json
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2_5_VLForConditionalGeneration

from model.templates import EDIT_PREFIX
from model.text_encoder import TextEncoder
from tests.edit_pipeline import TINY
from tools.tiny_grounding import HEADS, LastAttention, Look, lay_out, looking_loss, pointing, save_language
from tools.tiny_questions import ask, asked_scene
from tools.tiny_reader import TinyReader
from tools.tiny_scenes import emoji_lists


@pytest.fixture(scope="module")
def encoder():
    return TextEncoder.from_folder(TINY, torch.device("cpu"), with_vision=True)


@pytest.fixture(scope="module")
def asked(encoder):
    """Return a reader, scenes and questions: some of one thing, some of two, in both languages."""
    rng = random.Random(0)
    scenes = [asked_scene(rng, emoji_lists(), (0.3, 0.6, 0.1)) for _ in range(24)]
    questions = [ask(rng, scene) for scene in scenes]
    assert {len(json.loads(q.answer)) for q in questions} == {1, 2}
    assert {q.text.isascii() for q in questions} == {True, False}
    return TinyReader(encoder.vlm, encoder.tokenizer, is_frozen=False), scenes, questions


def test_a_name_is_looked_at_once_read_and_its_box_while_written(asked):
    reader, scenes, questions = asked
    rows, num_answer, looks = lay_out(reader, scenes, questions)
    decode = reader.tokenizer.decode
    for number, (row, length, scene, question) in enumerate(zip(rows, num_answer, scenes, questions, strict=True)):
        assert decode(row[-length:]) == question.answer + "<|im_end|>"
        answers = json.loads(question.answer)
        places = {look.number: look.cover for look in looks if look.row == number}
        # What follows a place of the answer, up to the box's last digit, is all that is written while looking.
        written = "".join(decode([row[place + 1]]) for place in sorted(places) if place >= len(row) - length)
        for answer in answers:
            box = json.dumps(answer["bbox_2d"], separators=(",", ":"))
            assert f'"bbox_2d":{box[:-1]}' in written
        # The text read so far has just named the thing when the looking begins.
        first = min(places)
        assert decode(row[: first + 1]).endswith(question.text[: question.looks[0][1] + 1])
        # What is covered lies around the middle of the thing that the answer tells.
        middles = [((left + right) / 2 / 1000, (top + bottom) / 2 / 1000) for left, top, right, bottom in (
            answer["bbox_2d"] for answer in answers
        )]  # fmt: skip
        for cover in places.values():
            grid = cover.view(reader.grid(scene.pixels))
            across, down = (grid.sum(i) / grid.sum() for i in (0, 1))
            x, y = (((torch.arange(len(w)) + 0.5) / len(w) * w).sum().item() for w in (across, down))
            assert min(max(abs(x - right), abs(y - low)) for right, low in middles) < 0.05


def test_attention_is_what_the_eager_model_reports(asked):
    reader, scenes, questions = asked
    rows, _, looks = lay_out(reader, scenes, questions)
    attention = LastAttention(reader.model)
    with attention.following(), torch.no_grad():
        reader.read(EDIT_PREFIX, rows, [scene.pixels for scene in scenes])
    eager = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        TINY / "text_encoder", dtype=torch.float32, attn_implementation="eager"
    )
    prefix = reader.tokenizer(EDIT_PREFIX)["input_ids"]
    for number in (0, 1, 5):
        inputs = reader.text.model_inputs([prefix + rows[number]], [scenes[number].pixels])
        with torch.no_grad():
            expected = eager(**inputs, output_attentions=True).attentions[-1][0]  # (heads, S, S)
        places = torch.tensor([look.number for look in looks if look.row == number])
        weights = attention.weights(torch.full_like(places, number), places)
        own = weights[..., : len(prefix) + len(rows[number])]
        torch.testing.assert_close(
            own, expected[list(HEADS)][:, places + len(prefix)].transpose(0, 1), atol=1e-5, rtol=0
        )


def test_looking_loss_closed_form():
    """Five keys before, six of the row, three of them the picture's; queries of nothing look everywhere alike."""
    attention = LastAttention.__new__(LastAttention)
    attention.query, attention.key, attention.scaling = torch.zeros(1, 4, 6, 8), torch.randn(1, 2, 11, 8), 1.0
    ids = torch.tensor([[7, 9, 9, 9, 7, 7]])
    looks = [Look(0, 4, torch.tensor([0.0, 1.0, 1.0]), ...), Look(0, 5, torch.tensor([0.5, 0.0, 0.0]), ...)]
    expected = -torch.tensor([2 / 10, 0.5 / 11]).log().mean()
    torch.testing.assert_close(looking_loss(attention, ids, 9, looks), expected)


def test_a_reader_that_trains_reads_its_prefix_anew(encoder, asked):
    reader, scenes, questions = asked
    rows, _, _ = lay_out(reader, scenes, questions)
    pictures = [scene.pixels for scene in scenes]
    _, states, mask, _ = reader.read(EDIT_PREFIX, rows, pictures)
    _, frozen, _, _ = TinyReader(encoder.vlm, encoder.tokenizer).read(EDIT_PREFIX, rows, pictures)
    assert torch.equal(states[mask], frozen[mask])
    norm = reader.model.model.language_model.layers[0].input_layernorm.weight.requires_grad_()
    try:
        ids, cache = reader._prefix(EDIT_PREFIX)
        assert all(part.requires_grad for layer in cache for part in layer)
    finally:
        norm.requires_grad_(False)


def test_only_the_language_model_changes(encoder, tmp_path):
    folder = shutil.copytree(TINY, tmp_path / "tiny")
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder / "text_encoder", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    save_language(model, folder)
    before, after = (load_file(f / "text_encoder/model.safetensors") for f in (TINY, folder))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor if name.startswith("visual.") else 2 * tensor), name


def test_things_are_found_by_their_names(encoder):
    """Guessing finds half of them."""
    found = pointing(encoder, num_scenes=60, seed=2)
    assert min(found.values()) >= 0.9, found
