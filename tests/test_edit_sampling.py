"""Edited pictures against the edit pipelines of `diffusers`: what the network is given, and what comes out."""

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from diffusers import QwenImageEditInpaintPipeline, QwenImageEditPipeline
from diffusers.pipelines.qwenimage import (
    pipeline_qwenimage_edit,
    pipeline_qwenimage_edit_inpaint,
    pipeline_qwenimage_edit_plus,
)
from PIL import Image

from model.encoders import Encoders
from model.kept_region import kept_cells, outside_boxes
from model.mmdit import MMDiT, MMDiTConfig
from model.sampling import SamplerSettings, generate
from parallel.weights import read_safetensors
from tests.edit_pipeline import as_tensor, make_edit_folder, picture_pipeline, random_picture
from tests.released_folder import TINY
from tools import sample
from utils.random_streams import torch_generator

AREA = 96 * 96
REFERENCES = [(96, 96), (64, 128), (128, 64)]  # fixed points at this area
INSTRUCTIONS = ["Remove the dog.", "把红苹果换成狗脸", "Draw both in the snow, and more of it.", "x"]
SETTINGS = SamplerSettings(num_steps=4, cfg_scale=3.0)
CONFIG = MMDiTConfig.from_folder(TINY / "transformer")


@pytest.mark.parametrize("wrong", [{"cfg_scale": x} for x in (-1.0, float("inf"), float("nan"))] + [{"num_steps": 0}])
def test_what_no_sampler_can_do_is_refused(wrong):
    with pytest.raises(ValueError, match="at least 1 step and a non-negative, finite cfg_scale, got"):
        dataclasses.replace(SETTINGS, **wrong)
    assert dataclasses.replace(SETTINGS, cfg_scale=0.0).cfg_scale == 0  # as if without a prompt


def test_a_wrong_scale_is_refused_before_weights_are_read(tmp_path):
    with pytest.raises(ValueError, match="finite cfg_scale, got 30 and -2.0"):
        sample.main(sample.Config(model=str(tmp_path / "none"), prompt=("x",), cfg_scale=-2.0))


@pytest.fixture(scope="module", params=[False, True], ids=["2509", "zero_cond_t"])
def folder(request, tmp_path_factory):
    """A released folder with a random transformer; that of 2511 modulates references with t = 0."""
    config = dataclasses.replace(CONFIG, zero_cond_t=request.param)
    return make_edit_folder(tmp_path_factory.mktemp("edit") / "model", config)


@pytest.fixture(scope="module")
def network(folder):
    network = MMDiT(MMDiTConfig.from_folder(folder / "transformer"))
    network.load_state_dict(read_safetensors(folder / "transformer"), strict=True)
    return network.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def encoders(folder):
    return Encoders(folder, torch.device("cpu"), with_vision=True)


@pytest.fixture
def small_areas(monkeypatch):
    """The pipeline's constants, made fit for the tiny model."""
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "CONDITION_IMAGE_SIZE", AREA)
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", AREA)


def noise_of(height: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(16, height // 8, width // 8, generator=torch_generator(seed, 0, 0, "edit test"))


def inputs_of(encoders, instruction, pictures):
    """Return text states of the instruction and of the negative prompt, and the references' latents."""
    seen = [as_tensor(picture) for picture in pictures]
    states = [encoders.prompt(text, pictures=seen) for text in (instruction, " ")]
    return *states, [encoders.reference_latents(None, picture) for picture in seen]


@pytest.mark.parametrize("num_references", [1, 2, 3])
def test_diffusers_draws_the_edits_that_we_draw(folder, network, encoders, small_areas, num_references):
    pictures = [random_picture(*REFERENCES[i], seed=i) for i in range(num_references)]
    instruction, (height, width) = INSTRUCTIONS[num_references - 1], [(96, 96), (64, 96), (128, 64)][num_references - 1]
    noise = noise_of(height, width)
    pipeline = picture_pipeline(folder)
    given = []
    pipeline.transformer.register_forward_pre_hook(lambda _, args, kwargs: given.append(kwargs), with_kwargs=True)
    theirs = pipeline(
        pictures, instruction, negative_prompt=" ", true_cfg_scale=SETTINGS.cfg_scale,
        num_inference_steps=SETTINGS.num_steps, height=height, width=width,
        latents=pipeline._pack_latents(noise[None], 1, 16, height // 8, width // 8),
    ).images[0]  # fmt: skip

    states, negative, references = inputs_of(encoders, instruction, pictures)
    taken = []
    hook = network.register_forward_pre_hook(lambda _, args: taken.append(args))
    (latents,) = generate(network, [states], [negative], [noise], SETTINGS, references=[references])
    hook.remove()
    picture = encoders.picture(latents).astype(int)
    assert picture.shape == (height, width, 3) and picture.std() > 10  # there is something to see
    assert abs(picture - np.asarray(theirs)).max() <= 1

    # What the networks were given in each step: they have conditional and unconditional one after the other.
    for step, (img, txt, t, layout, _) in enumerate(taken):
        for half, theirs in enumerate(given[2 * step : 2 * step + 2]):
            assert layout.grids[half] == tuple(theirs["img_shapes"][0])
            torch.testing.assert_close(img.chunk(2)[half], theirs["hidden_states"][0], atol=2e-3, rtol=1e-3)
            own = txt.split(layout.txt_lens)[half]
            torch.testing.assert_close(own, theirs["encoder_hidden_states"][0], atol=2e-5, rtol=1e-5)
            torch.testing.assert_close(t[half : half + 1], theirs["timestep"], atol=1e-6, rtol=0)
        first = taken[0][0].chunk(2)[0], given[0]["hidden_states"][0]
        torch.testing.assert_close(*first, atol=1e-5, rtol=1e-5)


def test_the_first_edit_pipeline_draws_the_same(folder, network, monkeypatch):
    """It sees one picture, of one size, without a label."""
    encoders = Encoders(folder, torch.device("cpu"), with_vision=True)
    encoders.text.labels_pictures = False
    monkeypatch.setattr(
        pipeline_qwenimage_edit, "calculate_dimensions", lambda area, ratio: (round(128 * ratio) // 2, 64, None)
    )
    picture, noise = random_picture(64, 128, seed=4), noise_of(64, 96)
    pipeline = picture_pipeline(folder, QwenImageEditPipeline)
    theirs = pipeline(
        picture, "Make it red.", negative_prompt=" ", true_cfg_scale=SETTINGS.cfg_scale,
        num_inference_steps=SETTINGS.num_steps, height=64, width=96,
        latents=pipeline._pack_latents(noise[None], 1, 16, 8, 12),
    ).images[0]  # fmt: skip
    states, negative, references = inputs_of(encoders, "Make it red.", [picture])
    (latents,) = generate(network, [states], [negative], [noise], SETTINGS, references=[references])
    assert abs(encoders.picture(latents).astype(int) - np.asarray(theirs)).max() <= 1


def test_the_inpainting_pipeline_keeps_the_same(folder, network, monkeypatch):
    """It sees one picture, of the result's size, and takes its noise from a generator."""
    encoders = Encoders(folder, torch.device("cpu"), with_vision=True)
    encoders.text.labels_pictures = False
    monkeypatch.setattr(pipeline_qwenimage_edit_inpaint, "calculate_dimensions", lambda area, ratio: (128, 64, None))
    picture, region = random_picture(64, 128, seed=4), np.zeros((64, 128), dtype=np.uint8)
    region[8:48, 24:88] = 255
    pipeline = picture_pipeline(folder, QwenImageEditInpaintPipeline)
    # It draws a reference's latents from what the VAE says; the other edit pipelines take the most likely ones.
    monkeypatch.setattr(pipeline, "_encode_vae_image", partial(QwenImageEditPipeline._encode_vae_image, pipeline))
    theirs = pipeline(
        picture, "Make it red.", mask_image=Image.fromarray(region), strength=1.0, negative_prompt=" ",
        true_cfg_scale=SETTINGS.cfg_scale, num_inference_steps=SETTINGS.num_steps, height=64, width=128,
        generator=torch.Generator().manual_seed(3),
    ).images[0]  # fmt: skip
    noise = [torch.randn(1, 1, 16, 8, 16, generator=torch.Generator().manual_seed(3))[0, 0]]
    states, negative, references = inputs_of(encoders, "Make it red.", [picture])
    asked = [states], [negative], noise, SETTINGS, None, [references]
    kept = kept_cells(torch.from_numpy(region) == 0, 8)
    (latents,), (free,) = (generate(network, *asked, kept) for kept in ([kept], None))
    assert torch.equal(latents[:, kept], references[0][:, kept])
    drawn, freely = (encoders.picture(x).astype(int) for x in (latents, free))
    assert abs(drawn - np.asarray(theirs)).max() <= 1 < 10 < abs(drawn - freely).max()


def test_what_is_kept_needs_a_reference_of_the_same_size(network, encoders):
    states, negative, references = inputs_of(encoders, "x", [random_picture(96, 96, seed=0)])
    for height, given in ((96, []), (64, references)):
        kept = torch.ones(height // 8, 12, dtype=torch.bool)
        with pytest.raises(
            ValueError, match=r"what is kept, .*, needs a first reference .*, got (None|\(16, 12, 12\))"
        ):
            generate(network, [states], [negative], [noise_of(height, 96)], SETTINGS, references=[given], kept=[kept])


@pytest.mark.parametrize("cfg_scale", [1.0, 3.0])
def test_a_batch_of_mixed_references_equals_one_by_one(network, encoders, cfg_scale):
    settings = dataclasses.replace(SETTINGS, cfg_scale=cfg_scale)
    noise = [noise_of(*size, seed=i) for i, size in enumerate([(96, 96), (64, 128), (128, 64), (64, 128)])]
    kept = [None, kept_cells(outside_boxes([(0, 0, 500, 700)], 64, 128, 1000), 8), None, None]
    cases = []
    for i, instruction in enumerate(INSTRUCTIONS):  # 0, 1, 2 and 3 references
        pictures = [random_picture(*REFERENCES[(i + j) % 3], seed=10 * i + j) for j in range(i)]
        cases.append(inputs_of(encoders, instruction, pictures))
    prompts, negatives, references = zip(*cases, strict=True)
    together = generate(network, prompts, negatives, noise, settings, references=references, kept=kept)
    for i in range(len(cases)):
        (alone,) = generate(
            network, prompts[i : i + 1], negatives[i : i + 1], noise[i : i + 1], settings,
            references=references[i : i + 1], kept=kept[i : i + 1],
        )  # fmt: skip
        assert together[i].shape == noise[i].shape
        torch.testing.assert_close(together[i], alone, atol=2e-4, rtol=2e-4)


def test_references_and_their_order_matter(network, encoders):
    pictures = [random_picture(96, 96, seed=i) for i in range(2)]
    states, negative, (first, second) = inputs_of(encoders, "x", pictures)

    def draw(references):
        (latents,) = generate(network, [states], [negative], [noise_of(64, 64)], SETTINGS, references=[references])
        return encoders.picture(latents).astype(int)

    drawn = [draw(r) for r in ([first, second], [second, first], [first], [])]
    for i in range(len(drawn)):
        for j in range(i):
            assert abs(drawn[i] - drawn[j]).max() > 10


def test_no_references_is_text_to_image(network, encoders):
    prompts, negative, noise = [encoders.prompt("dog face")], encoders.prompt(" "), [noise_of(64, 64)]
    without = generate(network, prompts, negative, noise, SETTINGS)
    assert torch.equal(without[0], generate(network, prompts, [negative], noise, SETTINGS, references=[[]])[0])


def test_what_was_encoded_is_kept_under_pictures_and_instruction(encoders):
    text, calls = encoders.text, []
    pictures = [as_tensor(random_picture(96, 96, seed=i)) for i in range(2)]
    encode, text.encode = text.encode, lambda *args: calls.append(args) or encode(*args)
    try:
        for _ in range(2):
            plain = encoders.prompt("Remove it.")
            none = encoders.prompt("Remove it.", pictures=[])
            one = encoders.prompt("Remove it.", pictures=pictures[:1], key="a")
            other = encoders.prompt("Remove it.", pictures=pictures[1:], key="b")
            both = encoders.prompt("Remove it.", pictures=pictures, key="a")
        assert len(calls) == 5 and len({len(states) for states in (plain, one, both)}) == 3
        assert torch.equal(none, encode("Remove it.", [])) and not torch.equal(one, other)
        encoders.prompt("Remove it.", pictures=pictures[:1])  # without a key nothing is known of the pictures
        encoders.prompt("Remove it.", pictures=pictures[:1])
        assert len(calls) == 7
    finally:
        del text.encode
    latents = encoders.reference_latents("a", pictures[0])
    assert torch.equal(latents, encoders.moments("other", lambda: pictures[0])[0])
    assert encoders.reference_latents("a", None) is latents  # and the target of the same name is another picture
    assert not torch.equal(encoders.moments("a", lambda: pictures[1])[0], latents)
