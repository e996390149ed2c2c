"""A run's adapters in other programs: `diffusers` draws with them what we draw, and merged they are one network."""

import json
import shutil

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_qwen_lora_to_diffusers
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import train_mmdit
from model.layout import PackedLayout
from model.mmdit import MMDiTConfig
from parallel.checkpoint import StoredTensors
from tests.released_folder import TINY, make_released
from tools import export, export_lora, sample
from utils.random_streams import torch_generator

PROMPTS = ("dog face", "狗脸 @64x96", "a red apple beside a green pear, in the snow @128x64")
SETTINGS = {"prompt": PROMPTS, "num_steps": 6, "cfg_scale": 3.0, "seed": 7, "dtype": "float32"}
RANK, ALPHA = 16, 24.0


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_released(tmp_path_factory.mktemp("lora") / "model", MMDiTConfig.from_folder(TINY / "transformer"))


@pytest.fixture(scope="module")
def run(model):
    """Three steps with a learning rate that is far too high, so that the adapters change the pictures."""
    folder = model.parent
    config = train_mmdit.Config(
        model=str(model), run_folder=str(folder / "run"), cache_folder=str(folder / "cache"), num_steps=3, lr=0.02,
        global_batch_size=4, max_tokens_per_micro_batch=200, warmup_steps=1, eval_every=0, sample_every=0,
        save_every=3, lora_rank=RANK, lora_alpha=ALPHA, ema_decay=0.5,
    )  # fmt: skip
    train_mmdit.main(config)
    return folder / "run"


@pytest.fixture(scope="module")
def files(run):
    """One file in each format, in float32."""
    made = {format: run.parent / f"{format}.safetensors" for format in ("diffusers", "comfyui")}
    for format, path in made.items():
        export_lora.main(export_lora.Config(str(run), str(path), format=format, dtype="float32"))
    return made


@pytest.fixture(scope="module")
def merged(run):
    export.main(export.Config(str(run), str(run.parent / "merged"), dtype="float32", merge=True))
    return run.parent / "merged"


def picture(path) -> np.ndarray:
    return np.asarray(Image.open(path)).astype(int)


def draw(pipeline: QwenImagePipeline, prompt: str, i: int) -> np.ndarray:
    text, width, height = sample.split_size(prompt, 64, 64)
    noise = torch.randn(16, height // 8, width // 8, generator=torch_generator(7, 0, i, "sample"))
    latents = pipeline._pack_latents(noise[None], 1, 16, height // 8, width // 8)
    drawn = pipeline(
        text, negative_prompt=" ", true_cfg_scale=3.0, num_inference_steps=6, height=height, width=width,
        latents=latents,
    ).images[0]  # fmt: skip
    return np.asarray(drawn).astype(int)


def test_diffusers_draws_with_the_adapter_what_we_draw(run, model, files, merged, tmp_path):
    sample.main(sample.Config(run=str(run), output=str(tmp_path / "run"), **SETTINGS))
    sample.main(sample.Config(model=str(merged), output=str(tmp_path / "merged"), **SETTINGS))
    pipeline = QwenImagePipeline.from_pretrained(model, torch_dtype=torch.float32, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    ours = [[picture(tmp_path / kind / f"{i:03d}.png") for kind in ("run", "merged")] for i in range(len(PROMPTS))]
    base = [draw(pipeline, prompt, i) for i, prompt in enumerate(PROMPTS)]
    for path in files.values():
        pipeline.load_lora_weights(str(path.parent), weight_name=path.name, adapter_name=path.stem)
        for i, prompt in enumerate(PROMPTS):
            theirs = draw(pipeline, prompt, i)
            assert all(abs(x - theirs).max() <= 1 for x in ours[i]), (path.name, prompt)
            assert abs(base[i] - theirs).mean() > 5, (path.name, prompt)  # loading did something
        pipeline.unload_lora_weights()
        assert abs(draw(pipeline, PROMPTS[0], 0) - base[0]).max() == 0


@pytest.fixture(scope="module")
def question():
    """Inputs of the network: (img, txt, t, layout) and what `diffusers` calls them."""
    random, config = torch_generator(0, 0, "inputs", "test"), MMDiTConfig.from_folder(TINY / "transformer")
    img = torch.randn(24, config.in_channels, generator=random)
    txt = torch.randn(7, config.joint_attention_dim, generator=random)
    t = torch.tensor([0.4])
    theirs = dict(
        hidden_states=img[None], timestep=t, encoder_hidden_states=txt[None], img_shapes=[[(1, 4, 6)]],
        encoder_hidden_states_mask=None, return_dict=False,
    )  # fmt: skip
    return (img, txt, t, PackedLayout.build([[(1, 4, 6)]], [7])), theirs


@torch.no_grad()
def test_merged_is_unmerged(run, model, files, merged, question):
    ours, theirs = question
    cpu = torch.device("cpu")
    unmerged = sample.load_model(str(run), "", -1, "ema", cpu, torch.float32)[0](*ours)
    from_merged = sample.load_model("", str(merged), -1, "", cpu, torch.float32)[0](*ours)
    base = sample.load_model("", str(model), -1, "", cpu, torch.float32)[0](*ours)
    opened = QwenImageTransformer2DModel.from_pretrained(merged / "transformer", local_files_only=True)
    scale = unmerged.abs().max()
    assert (from_merged - unmerged).abs().max() < 1e-5 * scale
    assert (opened(**theirs)[0][0] - unmerged).abs().max() < 1e-5 * scale
    assert (base - unmerged).abs().max() > 0.05 * scale


def test_every_key_is_one_that_diffusers_takes(run, model, files):
    tensors = load_file(files["diffusers"])
    network = QwenImageTransformer2DModel.from_pretrained(model / "transformer", local_files_only=True)
    shapes = {name: tuple(p.shape) for name, p in network.named_parameters()}
    layers = {name.removesuffix(".lora_A.weight") for name in tensors if name.endswith("lora_A.weight")}
    assert len(tensors) == 2 * len(layers) and "transformer.transformer_blocks.0.attn.to_q" in layers
    last = max(int(layer.split(".")[2]) for layer in layers)
    assert not [x for x in layers if f".{last}.txt_mlp" in x or f".{last}.attn.to_add_out" in x]  # without effect
    for layer in layers:
        rows, columns = shapes[layer.removeprefix("transformer.") + ".weight"]
        assert tensors[layer + ".lora_A.weight"].shape == (RANK, columns)
        assert tensors[layer + ".lora_B.weight"].shape == (rows, RANK)
        # What the last block's text asks for is not read: this gradient is zero.
        assert tensors[layer + ".lora_B.weight"].any() == (f".{last}.attn.add_q_proj" not in layer), layer
    with safe_open(files["diffusers"], framework="pt") as opened:
        found = json.loads(opened.metadata()["lora_adapter_metadata"])
    assert found["transformer.r"] == RANK and found["transformer.lora_alpha"] == ALPHA
    # The other file is the same adapter: diffusers' own converter, which knows no metadata, folds alpha / rank in.
    other = load_file(files["comfyui"])
    assert {"lora_down.weight", "lora_up.weight", "alpha"} == {
        name.partition("attn.to_q.")[2]
        for name in other
        if name.startswith("diffusion_model.transformer_blocks.0.attn.to_q.")
    }
    converted = _convert_non_diffusers_qwen_lora_to_diffusers(dict(other))
    assert converted.keys() == tensors.keys()
    for name, tensor in tensors.items():
        expected = tensor * (ALPHA / RANK) if "lora_A" in name else tensor
        assert torch.equal(converted[name], expected)


def test_bfloat16_raw_weights_and_overwriting(run, tmp_path):
    output = tmp_path / "raw.safetensors"
    config = export_lora.Config(str(run), str(output), weights="raw", format="comfyui")
    export_lora.main(config)
    stored, tensors = StoredTensors(run / "checkpoints"), load_file(output)
    name = "transformer_blocks.1.img_mlp.net.2"
    expected = stored.read(f"model.{name}.lora_A.weight").to(torch.bfloat16)
    assert torch.equal(tensors[f"diffusion_model.{name}.lora_down.weight"], expected)
    with pytest.raises(ValueError, match="--overwrite"):
        export_lora.main(config)
    with safe_open(output, framework="pt") as opened:
        assert opened.metadata()["step"] == "3" and opened.metadata()["weights"] == "raw"


def test_what_cannot_be_exported_is_named(run, model, tmp_path):
    with pytest.raises(ValueError, match="--merge builds them"):
        export.main(export.Config(str(run), str(tmp_path / "out")))
    with pytest.raises(ValueError, match="something.safetensors"):
        export_lora.main(export_lora.Config(str(run), str(tmp_path / "out")))
    # Another base: one bit of one weight
    other = tmp_path / "other"
    shutil.copytree(model, other)
    path = sorted((other / "transformer").glob("*.safetensors"))[0]
    tensors = load_file(path)
    name = sorted(tensors)[0]
    tensors[name].view(torch.int32).view(-1)[-1] ^= 1
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ValueError, match="another base"):
        export.main(export.Config(str(run), str(tmp_path / "out"), model=str(other), merge=True))
    # A run of the network itself
    plain = tmp_path / "plain"
    plain.mkdir()
    settings = json.loads((run / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(settings | {"lora_rank": 0}))
    shutil.copytree(run / "checkpoints", plain / "checkpoints")
    with pytest.raises(ValueError, match="trained no adapters"):
        export.main(export.Config(str(plain), str(tmp_path / "out"), merge=True))
    with pytest.raises(ValueError, match="trained no adapters"):
        export_lora.main(export_lora.Config(str(plain), str(tmp_path / "x.safetensors")))
    assert not list(tmp_path.glob("out*")) and not list(tmp_path.glob("*.safetensors"))
