"""Export of edit runs: the trained planner loads in transformers, and the edit pipeline draws what the run draws."""

import json

import numpy as np
import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus
from transformers import Qwen2_5_VLForConditionalGeneration

from model.mmdit import MMDiTConfig
from parallel.weights import read_safetensors
from tests.edit_pipeline import make_edit_folder, picture_pipeline, random_picture
from tests.released_folder import TINY
from tests.run_folder import make_run
from tools import export
from tools.edit import QwenImageEditor
from utils.random_streams import torch_generator

AREA = 96 * 96
SETTINGS = {"num_steps": 2, "cfg_scale": 3.0, "dtype": torch.float32, "device": torch.device("cpu"), "plan": False}


def make_edit_run(path, folder, tensors, train):
    run = make_run(path, folder, tensors)
    config = {"model": str(folder), "train": train, "reference_pixels": AREA, "condition_pixels": AREA, "data": "d"}
    (run / "config.json").write_text(json.dumps(config))
    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = MMDiTConfig.from_folder(TINY / "transformer")
    return make_edit_folder(tmp_path_factory.mktemp("edit") / "model", config)


@pytest.fixture(scope="module")
def tensors():
    """A planner whose language model was trained, and whose vision tower was frozen, so that no run stores it."""
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(TINY / "text_encoder", dtype=torch.float32)
    torch.manual_seed(1)
    trained = {n: p + 0.1 * p.std() * torch.randn_like(p) for n, p in model.named_parameters() if "visual" not in n}
    return {f"planner.vlm.{name}": tensor.detach() for name, tensor in trained.items()}


def opened(folder, dtype):
    model, info = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(info.values()), info
    return dict(model.named_parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_planner_loads_in_transformers_as_it_was_trained(folder, tensors, tmp_path, dtype):
    network = {f"ema.{name}": -tensor for name, tensor in read_safetensors(folder / "transformer").items()}
    run = make_edit_run(tmp_path / "run", folder, tensors | network, "planner,renderer")
    export.main(export.Config(str(run), str(tmp_path / "out"), dtype=dtype, max_shard_gb=1e-3))
    found, kind = opened(tmp_path / "out/text_encoder", getattr(torch, dtype)), getattr(torch, dtype)
    base = opened(folder / "text_encoder", kind)
    assert found.keys() == base.keys()
    for name, parameter in found.items():
        assert torch.equal(parameter, tensors.get(f"planner.vlm.{name}", base[name]).to(kind)), name
    stored, released = (read_safetensors(path / "text_encoder") for path in (tmp_path / "out", folder))
    assert stored.keys() == released.keys()  # the released names
    assert len(list((tmp_path / "out/text_encoder").glob("*.safetensors"))) > 1
    card = (tmp_path / "out/README.md").read_text(encoding="utf-8")
    assert "QwenImageEditPlusPipeline" in card and "QwenImagePipeline" not in card and "image-to-image" in card
    assert f"| planner | trained, in text_encoder/, {dtype} |" in card and f"trained at {AREA} and {AREA}" in card


def test_the_edit_pipeline_draws_what_the_run_draws(folder, tensors, tmp_path, monkeypatch):
    network = {f"ema.{name}": -tensor for name, tensor in read_safetensors(folder / "transformer").items()}
    run = make_edit_run(tmp_path / "run", folder, tensors | network, "planner,renderer")
    export.main(export.Config(str(run), str(tmp_path / "out"), dtype="float32"))
    for name in ("CONDITION_IMAGE_SIZE", "VAE_IMAGE_SIZE"):
        monkeypatch.setattr(pipeline_qwenimage_edit_plus, name, AREA)
    pictures, instruction = [random_picture(96, 96, seed=1)], "Remove the dog."
    ours = np.asarray(QwenImageEditor(run, **SETTINGS).edit(pictures, instruction, seed=5).image).astype(int)
    noise = torch.randn(16, 12, 12, generator=torch_generator(5, 0, 0, "edit"))
    pipeline = picture_pipeline(tmp_path / "out")
    theirs = pipeline(
        pictures, instruction, negative_prompt=" ", true_cfg_scale=3.0, num_inference_steps=2, height=96, width=96,
        latents=pipeline._pack_latents(noise[None], 1, 16, 12, 12),
    ).images[0]  # fmt: skip
    assert abs(ours - np.asarray(theirs).astype(int)).max() <= 1
    untrained = QwenImageEditor(folder, reference_pixels=AREA, condition_pixels=AREA, **SETTINGS)
    before = np.asarray(untrained.edit(pictures, instruction, seed=5).image).astype(int)
    assert abs(ours - before).max() > 10


def test_a_run_of_the_planner_alone(folder, tensors, tmp_path, capfd):
    run = make_edit_run(tmp_path / "run", folder, tensors, "planner")
    capfd.readouterr()
    export.main(export.Config(str(run), str(tmp_path / "out")))
    assert capfd.readouterr().err == ""  # no bar of a library, which would be there without a terminal as well
    original = (folder / "transformer").iterdir()
    assert {p.name: p.read_bytes() for p in original} == {
        p.name: p.read_bytes() for p in (tmp_path / "out/transformer").iterdir()
    }
    assert opened(tmp_path / "out/text_encoder", torch.bfloat16)
    with pytest.raises(ValueError, match="the planner alone, which ComfyUI's file"):
        export.main(export.Config(str(run), str(tmp_path / "x.safetensors"), format="comfyui"))
    bare = make_edit_run(tmp_path / "bare", TINY, tensors, "planner")
    with pytest.raises(ValueError, match="the run trained no renderer and .* has no weights in transformer"):
        export.main(export.Config(str(bare), str(tmp_path / "y")))


def test_a_planner_of_another_model_is_refused(folder, tensors, tmp_path):
    wrong = tensors | {"planner.vlm.model.language_model.norm.weight": torch.ones(3)}
    run = make_edit_run(tmp_path / "run", folder, wrong, "planner")
    with pytest.raises(ValueError, match=r"planner has model.language_model.norm.weight, \(3,\)"):
        export.main(export.Config(str(run), str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


def test_a_run_on_edits_of_the_other_script_has_an_edit_model_s_card(folder, tmp_path):
    network = {f"ema.{name}": tensor for name, tensor in read_safetensors(folder / "transformer").items()}
    run = make_run(tmp_path / "run", folder, network)
    for task, pipeline in (("edit", "QwenImageEditPlusPipeline"), ("t2i", "QwenImagePipeline")):
        (run / "config.json").write_text(json.dumps({"model": str(folder), "task": task}))
        export.main(export.Config(str(run), str(tmp_path / task)))
        assert f"import {pipeline}\n" in (tmp_path / task / "README.md").read_text()
