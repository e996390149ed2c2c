"""Export: diffusers draws with it what we draw, and its card tells the truth."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImagePipeline, QwenImageTransformer2DModel
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift
from PIL import Image

import train_mmdit
from model.layout import PackedLayout
from model.mmdit import MMDiT, MMDiTConfig
from model.sampling import SamplerSettings
from parallel.weights import read_safetensors
from tests.released_folder import TINY, make_released, same_bytes, weights_of
from tests.run_folder import SMALL, make_run
from tools import export, sample
from utils.random_streams import torch_generator


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    return make_released(tmp_path_factory.mktemp("released") / "small", SMALL)


@pytest.fixture(scope="module")
def run(released, tmp_path_factory):
    """A run whose checkpoints hold the released weights as their average and others as raw weights."""
    average = weights_of(released)
    raw = {name.replace("ema.", "model."): -tensor for name, tensor in average.items()}
    return make_run(tmp_path_factory.mktemp("runs") / "run", released, average | raw, steps=(3, 5))


# ---- The language embedding -----------------------------------------------------------------------------------------


@pytest.fixture
def bilingual(released, tmp_path):
    """A run with a language embedding, and its network."""
    config = dataclasses.replace(SMALL, num_languages=3)
    network = MMDiT(config)
    random = torch_generator(0, 0, "bilingual", "test")
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(std=0.2, generator=random)
    tensors = {f"ema.{name}": parameter.detach() for name, parameter in network.named_parameters()}
    return make_run(tmp_path / "bilingual", released, tensors), network


@pytest.mark.parametrize("row, language", [(0, "zh"), (1, "en"), (2, "other")])
def test_a_built_in_language_is_the_network_for_that_language(bilingual, tmp_path, row, language):
    run, network = bilingual
    export.main(export.Config(str(run), str(tmp_path / "out"), dtype="float32", language=language))
    opened = QwenImageTransformer2DModel.from_pretrained(tmp_path / "out/transformer", local_files_only=True)
    random = torch_generator(0, 0, "language", "test")
    img, txt = torch.randn(6, 8, generator=random), torch.randn(5, 9, generator=random)
    layout, t = PackedLayout.build([[(1, 2, 3)]], [5]), torch.tensor([0.7])
    with torch.no_grad():
        ours = network(img, txt, t, layout, torch.tensor([row]))
        other = network(img, txt, t, layout, torch.tensor([(row + 1) % 3]))
        theirs = opened(
            hidden_states=img[None], timestep=t, encoder_hidden_states=txt[None], img_shapes=[[(1, 2, 3)]],
            encoder_hidden_states_mask=None, return_dict=False,
        )[0][0]  # fmt: skip
    assert (ours - theirs).abs().max() < 1e-4 * ours.abs().max()
    assert (ours - other).abs().max() > 1e-2 * ours.abs().max()


def test_a_language_embedding_is_never_lost(bilingual, run, released, tmp_path):
    with pytest.raises(ValueError, match="--language"):
        export.main(export.Config(str(bilingual[0]), str(tmp_path / "out")))
    with pytest.raises(ValueError, match="no language embedding"):
        export.main(export.Config(str(run), str(tmp_path / "out"), language="en"))
    untrained = weights_of(released) | {"ema.language_embed.weight": torch.zeros(3, SMALL.width)}
    made = make_run(tmp_path / "untrained", released, untrained)
    export.main(export.Config(str(made), str(tmp_path / "out"), dtype="float32"))
    assert same_bytes(read_safetensors(tmp_path / "out/transformer"), read_safetensors(released / "transformer"))


# ---- A trained run, drawn by us and by diffusers --------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Three steps from a tiny transformer with random weights."""
    folder = tmp_path_factory.mktemp("trained")
    model = make_released(folder / "model", MMDiTConfig.from_folder(TINY / "transformer"))
    config = train_mmdit.Config(
        model=str(model), run_folder=str(folder / "run"), cache_folder=str(folder / "cache"), num_steps=3,
        global_batch_size=4, max_tokens_per_micro_batch=200, warmup_steps=1, eval_every=3, eval_samples=2,
        sample_every=0, save_every=3,
    )  # fmt: skip
    train_mmdit.main(config)
    return folder / "run"


def test_diffusers_draws_the_pictures_that_we_draw(trained, tmp_path):
    folder = tmp_path / "exported"
    export.main(export.Config(str(trained), str(folder), dtype="float32"))
    prompts = ("dog face", "狗脸 @64x96", "a very long caption of a red apple beside a green pear, in the snow @128x64")
    settings = {"prompt": prompts, "num_steps": 6, "cfg_scale": 3.0, "seed": 7, "dtype": "float32"}
    sample.main(sample.Config(run=str(trained), output=str(tmp_path / "run"), **settings))
    sample.main(sample.Config(model=str(folder), output=str(tmp_path / "folder"), **settings))
    pipeline = QwenImagePipeline.from_pretrained(folder, torch_dtype=torch.float32, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)

    def draw(prompt: str, i: int) -> np.ndarray:
        text, width, height = sample.split_size(prompt, 64, 64)
        noise = torch.randn(16, height // 8, width // 8, generator=torch_generator(7, 0, i, "sample"))
        latents = pipeline._pack_latents(noise[None], 1, 16, height // 8, width // 8)
        picture = pipeline(
            text, negative_prompt=" ", true_cfg_scale=3.0, num_inference_steps=6, height=height, width=width,
            latents=latents,
        ).images[0]  # fmt: skip
        return np.asarray(picture).astype(int)

    for i, prompt in enumerate(prompts):
        theirs = draw(prompt, i)
        for ours in ("run", "folder"):
            picture = np.asarray(Image.open(tmp_path / ours / f"{i:03d}.png")).astype(int)
            assert picture.shape == theirs.shape and abs(picture - theirs).max() <= 1
    assert abs(draw(prompts[0], 0) - draw("pizza", 0)).max() > 10  # it listens to the prompt


def test_the_folder_s_own_scheduler_is_heeded(trained, tmp_path):
    folder = tmp_path / "exported"
    export.main(export.Config(str(trained), str(folder), dtype="float32"))
    path = folder / "scheduler/scheduler_config.json"
    released = sample.sampler_settings(folder, 8, 1.0)
    assert released == SamplerSettings(8, 1.0)
    changed = json.loads(path.read_text()) | {"base_shift": 1.1, "shift_terminal": None, "base_image_seq_len": 100}
    del changed["max_shift"], changed["max_image_seq_len"]  # what the library takes then is none of ours
    path.write_text(json.dumps(changed))
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler")
    tokens = 700
    mu = calculate_shift(tokens, *(scheduler.config[name] for name in (
        "base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift"
    )))  # fmt: skip
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / 8, 8), mu=mu)
    ours = sample.sampler_settings(folder, 8, 1.0).grid(tokens)
    assert (ours - scheduler.sigmas).abs().max() < 1e-6 < (ours - released.grid(tokens)).abs().max()
    path.write_text(json.dumps(changed | {"use_karras_sigmas": True}))
    with pytest.raises(ValueError, match="use_karras_sigmas"):
        sample.sampler_settings(folder, 8, 1.0)


def test_the_card_of_a_trained_run(trained, tmp_path):
    export.main(export.Config(str(trained), str(tmp_path / "out"), license="mit"))
    card = (tmp_path / "out/README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlicense: mit\nlibrary_name: diffusers\n")
    metrics = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    val_loss = next(m["val_loss"] for m in metrics if m["step"] == 3 and "val_loss" in m)
    facts = [
        "| step | 3 |",
        "| weights | ema |",
        "| dtype | bfloat16 |",
        "| samples seen | 12 |",
        "| data | emoji-small |",
    ]
    facts += ["CC-BY 4.0", f"| validation loss | {val_loss:.4f} |", "| started from | model |", '"lr": 0.004']
    facts += ["torch_dtype=torch.bfloat16", "| code | commit "]
    assert not [fact for fact in facts if fact not in card]
    assert json.loads((tmp_path / "out/export.json").read_text())["step"] == "3"
    # What it tells its reader to type draws a picture, in the dtype of the export.
    code, names = card.split("```python\n")[1].split("```")[0], {}
    exec(code.replace("path/to/this/folder", str(tmp_path / "out")), names)
    assert names["picture"].size == (64, 64) and names["pipeline"].transformer.dtype == torch.bfloat16


def test_the_licence_is_that_of_the_weights_it_began_with(run, released, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(released, model)
    (model / "README.md").write_text("---\nlicense: apache-2.0\ntags: [x]\n---\n# Base\n")
    (model / "LICENSE").write_text("the licence")
    export.main(export.Config(str(run), str(tmp_path / "out"), model=str(model)))
    assert "license: apache-2.0\n" in (tmp_path / "out/README.md").read_text()
    assert (tmp_path / "out/LICENSE").read_text() == "the licence"
    (model / "README.md").write_text("# A model whose card states nothing\n")
    export.main(export.Config(str(run), str(tmp_path / "other"), model=str(model)))
    assert "license: unknown\n" in (tmp_path / "other/README.md").read_text()
