"""Text states of edits against those of the edit pipelines of `diffusers`, and pictures against `transformers`."""

import json
import shutil

import numpy as np
import pytest
import torch
from diffusers import QwenImageEditPipeline
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from model import templates
from model.text_encoder import TextEncoder
from model.vision_input import VisionGeometry
from tests.edit_pipeline import TINY, as_tensor, random_picture, text_pipeline

SIZES = [(96, 96), (64, 128), (128, 64)]
INSTRUCTIONS = [
    "Remove the dog.",
    "把这张图里的矿泉水瓶换成玻璃水杯，并在右下角加上“限时折扣”四个字",
    "x",
    "\n two lines\n",
]


@pytest.fixture(scope="module")
def encoder():
    return TextEncoder.from_folder(TINY, torch.device("cpu"), with_vision=True)


@pytest.fixture(scope="module")
def pipeline(encoder):
    pipeline = text_pipeline()
    pipeline.prompt_template_encode_start_idx = encoder.num_edit_prefix_tokens
    return pipeline


@pytest.mark.parametrize(("height", "width"), [*SIZES, (384, 384), (100, 40), (30, 30), (1200, 1600), (20, 300)])
def test_pictures_are_cut_as_the_library_cuts_them(height, width):
    picture = random_picture(height, width, seed=height)
    expected = Qwen2VLImageProcessorPil()(images=[picture], return_tensors="pt")
    patches, grids = VisionGeometry().patches([as_tensor(picture)])
    assert torch.equal(patches, expected["pixel_values"]) and torch.equal(grids, expected["image_grid_thw"])
    assert VisionGeometry().num_tokens(height, width) == len(patches) // 4


@pytest.mark.parametrize("num_pictures", [0, 1, 2, 3])
@pytest.mark.parametrize("instruction", INSTRUCTIONS, ids=["en", "zh", "short", "lines"])
def test_states_equal_the_pipeline_s(encoder, pipeline, instruction, num_pictures):
    pictures = [random_picture(*SIZES[i], seed=i) for i in range(num_pictures)]
    expected, _ = pipeline.encode_prompt(instruction, pictures or None, torch.device("cpu"))
    states = encoder.encode(instruction, [as_tensor(picture) for picture in pictures])
    assert states.shape == expected.shape[1:]
    assert (states - expected[0]).abs().max() <= 1e-5 * expected.abs().max()
    assert encoder.count_tokens(instruction, [p.size[::-1] for p in pictures]) == len(states)


def test_states_equal_those_of_the_first_edit_pipeline(encoder, tmp_path):
    folder = shutil.copytree(TINY, tmp_path / "tiny")
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "QwenImageEditPipeline"}))
    first = TextEncoder.from_folder(folder, torch.device("cpu"), with_vision=True)
    pipeline = text_pipeline(QwenImageEditPipeline)
    pipeline.prompt_template_encode_start_idx = first.num_edit_prefix_tokens
    picture = random_picture(64, 128, seed=5)
    expected, _ = pipeline.encode_prompt("Make it red.", picture, torch.device("cpu"))
    states = first.encode("Make it red.", [as_tensor(picture)])
    assert (states - expected[0]).abs().max() <= 1e-5 * expected.abs().max()
    assert len(states) < len(encoder.encode("Make it red.", [as_tensor(picture)]))  # which has "Picture 1: "


def test_without_the_tokens_kinds_states_are_others(encoder, pipeline):
    """The pipelines as they are with transformers 5: pictures without rows and columns (diffusers #14194)."""
    bare = text_pipeline(with_kinds=False)
    bare.prompt_template_encode_start_idx = encoder.num_edit_prefix_tokens
    picture = random_picture(96, 96, seed=0)
    flat, _ = bare.encode_prompt("Remove the dog.", [picture], torch.device("cpu"))
    states = encoder.encode("Remove the dog.", [as_tensor(picture)])
    assert (states - flat[0]).abs().max() > 1e-3 * flat.abs().max()


def test_text_to_image_is_what_it_was(encoder):
    blind = TextEncoder.from_folder(TINY, torch.device("cpu"))
    assert torch.equal(blind.encode("dog face"), encoder.encode("dog face")) and blind.vlm is None
    with pytest.raises(ValueError, match="without its vision tower"):
        blind.encode("dog face", [])


def test_edits_are_counted_with_the_tokenizer_alone(encoder, tmp_path):
    counter = TextEncoder.tokenizer_only(TINY)
    for sizes in ([], SIZES):
        assert counter.count_tokens("Remove it.", sizes) == encoder.count_tokens("Remove it.", sizes)
    assert counter.edit_tokenizer_id == encoder.edit_tokenizer_id != encoder.tokenizer_id == counter.tokenizer_id
    folder = shutil.copytree(TINY, tmp_path / "tiny")
    config = json.loads((folder / "text_encoder/config.json").read_text())
    config["vision_config"]["patch_size"] = 7
    (folder / "text_encoder/config.json").write_text(json.dumps(config))
    finer = TextEncoder.tokenizer_only(folder)
    assert finer.edit_tokenizer_id != encoder.edit_tokenizer_id and finer.tokenizer_id == encoder.tokenizer_id
    assert finer.count_tokens("x", [(84, 84)]) == encoder.count_tokens("x", [(84, 84)]) + 27
    del config["vision_config"]
    (folder / "text_encoder/config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="vision_config"):
        TextEncoder.tokenizer_only(folder).count_tokens("x", [])


def test_a_long_instruction_is_cut_but_not_its_pictures_or_the_end_of_the_turn(encoder):
    picture = as_tensor(random_picture(96, 96, seed=0))
    before = encoder.num_truncated
    tokens = encoder.edit_tokens("很长" * 2000, [(96, 96)])
    assert tokens.stop - tokens.start == templates.MAX_TOKENS and encoder.num_truncated == before + 1
    suffix = encoder.tokenizer(templates.SUFFIX)["input_ids"]
    assert tokens.ids[-len(suffix) :] == suffix and tokens.ids.count(encoder.image_pad) == 9
    assert encoder.encode("很长" * 2000, [picture]).shape == (templates.MAX_TOKENS, 128)
    assert encoder.count_tokens("很长" * 2000, [(96, 96)]) == templates.MAX_TOKENS


def test_refuses_a_picture_s_place_in_an_instruction_and_pictures_that_fill_everything(encoder):
    with pytest.raises(ValueError, match="stands for a picture"):
        encoder.count_tokens("add <|image_pad|> here", [(96, 96)])
    with pytest.raises(ValueError, match="make --condition_pixels smaller"):
        encoder.count_tokens("x", [(960, 960)])


def test_patches_do_not_change_the_picture():
    picture = torch.from_numpy(np.arange(3 * 56 * 56, dtype=np.uint8).reshape(3, 56, 56) % 251)
    kept = picture.clone()
    VisionGeometry().patches([picture, picture])
    assert torch.equal(picture, kept)
