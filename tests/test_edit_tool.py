"""The edit tool on a released folder and on runs: pictures as the pipeline's, plans as the planner learned them."""

import json
import logging

import numpy as np
import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus
from PIL import Image

from data.edit_plan import EditPlan
from data.word_filter import RefusedInstructionError
from model.edit_planner import Planner, PlannerInput
from model.mmdit import MMDiTConfig
from model.text_encoder import TextEncoder
from parallel.fingerprint import fingerprint
from parallel.weights import read_safetensors
from tests.edit_pipeline import as_tensor, make_edit_folder, picture_pipeline, random_picture
from tests.released_folder import TINY
from tests.run_folder import make_run
from tools import edit
from tools.edit import EditRequest, QwenImageEditor, pixels_at, read_image
from utils.random_streams import torch_generator

AREA = 96 * 96
PLAN = EditPlan.from_json([{"action": "remove", "target": "dog face", "bbox": [10, 20, 480, 900]}]).to_text()
SETTINGS = {"num_steps": 3, "cfg_scale": 3.0, "dtype": torch.float32, "device": torch.device("cpu")}
AREAS = {"reference_pixels": AREA, "condition_pixels": AREA}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = MMDiTConfig.from_folder(TINY / "transformer")
    return make_edit_folder(tmp_path_factory.mktemp("edit") / "model", config)


@pytest.fixture(scope="module")
def editor(folder):
    return QwenImageEditor(folder, plan=False, **SETTINGS, **AREAS)


@pytest.fixture(scope="module")
def planner():
    """A planner that has learned one plan by heart."""
    planner = Planner(TextEncoder.from_folder(TINY, torch.device("cpu"), with_vision=True))
    sample = PlannerInput("Remove the dog.", [as_tensor(random_picture(96, 96, seed=0))], PLAN)
    optimizer = torch.optim.AdamW(planner.parameters(), lr=3e-3)
    while not (output := planner([sample])).is_exact.all():
        optimizer.zero_grad()
        output.loss_per_sample.sum().backward()
        optimizer.step()
    return planner


def test_an_opened_picture_is_turned_as_its_file_is(tmp_path):
    for kind in ("jpeg", "png", "tiff"):
        path, tags = tmp_path / f"lying.{kind}", Image.Exif()
        tags[0x0112] = 6  # to be turned by 90° to the right
        random_picture(64, 96, seed=3).save(path, exif=tags)
        with Image.open(path) as opened:
            assert read_image(opened).size == (96, 64)[::-1] == read_image(path).size
            assert read_image(opened).tobytes() == read_image(path).tobytes()
    assert read_image(random_picture(64, 96, seed=3)).tobytes() == random_picture(64, 96, seed=3).tobytes()


def make_edit_run(path, folder, tensors):
    """Make a run folder that knows its areas, as train_edit_ddp.py writes it."""
    run = make_run(path, folder, tensors)
    (run / "config.json").write_text(json.dumps({"model": str(folder), "train": "planner,renderer", **AREAS}))
    return run


def renderer_of(folder, prefix: str, sign: float = 1.0) -> dict[str, torch.Tensor]:
    return {prefix + name: sign * tensor for name, tensor in read_safetensors(folder / "transformer").items()}


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image).astype(int)


def test_an_edit_is_the_pipeline_s(folder, editor, monkeypatch):
    """References that are no fixed points are resized as the pipeline does, and so is the result's size chosen."""
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "CONDITION_IMAGE_SIZE", AREA)
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", AREA)
    pictures = [random_picture(200, 150, seed=1), random_picture(70, 300, seed=2)]
    ours = editor.edit(pictures, "把红苹果换成狗脸", seed=5).image
    width, height = pipeline_qwenimage_edit_plus.calculate_dimensions(AREA, 300 / 70)
    assert ours.size == (width, height)
    noise = torch.randn(16, height // 8, width // 8, generator=torch_generator(5, 0, 0, "edit"))
    pipeline = picture_pipeline(folder)
    theirs = pipeline(
        pictures, "把红苹果换成狗脸", negative_prompt=" ", true_cfg_scale=3.0, num_inference_steps=3, height=height,
        width=width, latents=pipeline._pack_latents(noise[None], 1, 16, height // 8, width // 8),
    ).images[0]  # fmt: skip
    assert abs(pixels(ours) - pixels(theirs)).max() <= 1
    assert abs(pixels(editor.edit(pictures, "x", width=width, height=height, seed=5).image) - pixels(ours)).max() > 10


@pytest.mark.parametrize("max_tokens", [8192, 200])
def test_edits_in_packs_equal_one_by_one(editor, monkeypatch, max_tokens):
    monkeypatch.setattr(editor, "max_tokens_per_pack", max_tokens)
    a, b, c = (random_picture(*size, seed=i) for i, size in enumerate([(96, 96), (64, 128), (128, 64)]))
    requests = [
        EditRequest("Remove the dog.", [a]), EditRequest("加上一只猫", [a, b, c], seed=1),
        EditRequest("dog face", [], 64, 96, seed=2), EditRequest("Swap them.", [c, b], 96, 64, seed=3),
    ]  # fmt: skip
    together = editor.edit_many(requests)
    assert [r.image.size for r in together] == [(96, 96), (64, 128), (64, 96), (96, 64)]
    for request, result in zip(requests, together, strict=True):
        (alone,) = editor.edit_many([request])
        assert abs(pixels(alone.image) - pixels(result.image)).max() <= 1 and result.plan is None


def test_a_run_gives_its_trained_planner_and_either_renderer(folder, planner, tmp_path):
    tensors = renderer_of(folder, "ema.") | renderer_of(folder, "renderer.", -1.0)
    for name in [n for n in tensors if n.startswith("renderer.transformer_blocks.3.txt_mlp")]:
        del tensors[name]  # nothing depends on it, and DDP does not train it
    tensors |= {f"planner.{name}": p.detach() for name, p in planner.named_parameters()}
    run = make_edit_run(tmp_path / "run", folder, tensors)
    average, raw = (QwenImageEditor(run, weights=w, **SETTINGS) for w in ("ema", "raw"))
    assert average.reference_pixels == average.condition_pixels == AREA  # as trained
    picture = random_picture(96, 96, seed=0)
    result = average.edit(picture, "Remove the dog.")
    assert result.plan.to_text() == PLAN
    # The renderer is guided by the trained planner's states.
    untrained = QwenImageEditor(folder, plan=False, **SETTINGS, **AREAS).edit(picture, "Remove the dog.")
    assert abs(pixels(result.image) - pixels(untrained.image)).max() > 10
    assert abs(pixels(result.image) - pixels(raw.edit(picture, "Remove the dog.").image)).max() > 10


def test_all_outside_of_the_plan_s_boxes_stays_if_asked(folder, planner, tmp_path):
    tensors = renderer_of(folder, "ema.") | {f"planner.{name}": p.detach() for name, p in planner.named_parameters()}
    run, picture = make_edit_run(tmp_path / "run", folder, tensors), random_picture(96, 96, seed=0)
    editor = QwenImageEditor(run, keep="plan", **SETTINGS)
    result = editor.edit(picture, "Remove the dog.")
    inside = np.zeros((96, 96), dtype=bool)
    inside[1:87, 1:47] = True  # the box, in pixels 0.96 to 46.08 and 1.92 to 86.4
    assert result.plan.to_text() == PLAN and result.kept == 1 - inside.mean()
    assert np.array_equal(pixels(result.image)[~inside], pixels(picture)[~inside])
    freely = QwenImageEditor(run, **SETTINGS).edit(picture, "Remove the dog.")
    assert freely.kept == 0 and abs(pixels(freely.image) - pixels(picture))[~inside].mean() > 10
    # The sampler knows what stays: what it draws beside it differs from what it draws freely.
    assert abs(pixels(result.image) - pixels(freely.image))[inside].max() > 10
    # Of another size than the first reference, nothing can stay where it is.
    assert editor.edit(picture, "Remove the dog.", 64, 96).kept == 0
    for wrong in ({"keep": "all"}, {"keep": "plan", "plan": False}):
        with pytest.raises(ValueError, match="what is kept is one of nothing, plan"):
            QwenImageEditor(run, **SETTINGS, **wrong)


def test_a_mask_says_where_the_picture_may_change(editor, tmp_path):
    picture, white = random_picture(200, 200, seed=1), np.zeros((200, 200), dtype=np.uint8)
    white[50:100, 150:151] = 255  # at 96 x 96 pixels rows 24 to 48 of column 72
    Image.fromarray(white).save(path := tmp_path / "mask.png")
    for mask in (path, Image.fromarray(white)):
        (result,) = editor.edit_many([EditRequest("Remove the dog.", [picture], mask=mask)])
        assert result.image.size == (96, 96) and result.kept == 1 - 24 / 96**2
        stays = np.ones((96, 96), dtype=bool)
        stays[24:48, 72] = False
        resized = pixels_at(picture, AREA).permute(1, 2, 0).numpy()
        assert np.array_equal(pixels(result.image)[stays], resized[stays])
    # One white pixel of 2.25 million is a 244th of one of the result's, and of a picture of 9 million a 977th.
    for side in (1500, 3000):
        dot = np.zeros((side, side), dtype=np.uint8)
        dot[side // 2, side // 2] = 255
        request = EditRequest("Remove the dog.", [picture.resize((side, side))], mask=Image.fromarray(dot))
        assert editor.edit_many([request])[0].kept == 1 - 1 / 96**2
    other = random_picture(64, 128, seed=2)
    for request, message in [
        (EditRequest("x", [picture], mask=tmp_path / "none.png"), "mask .*none.png"),
        (EditRequest("x", [picture], mask=Image.fromarray(white[:100])), "mask : its mask is 200 pixels wide and 100"),
        (EditRequest("x", [picture], mask=Image.fromarray(0 * white)), "nowhere white"),
        (EditRequest("x", [], 64, 64, mask=path), "a mask needs a first reference of the result's size 64 x 64"),
        (EditRequest("x", [picture, other], mask=path), "result's size 128 x 64, got 96 x 96"),
    ]:
        with pytest.raises(ValueError, match=message):
            editor.edit_many([request])


def test_what_a_run_did_not_train_is_its_folder_s(folder, editor, planner, tmp_path):
    vision = {f"planner.{n}": p.detach() for n, p in planner.vlm.named_parameters() if ".visual." not in n}
    run = make_edit_run(tmp_path / "planner-only", folder, vision)
    partly = QwenImageEditor(run, **SETTINGS)
    theirs, ours = (e.network.state_dict() for e in (editor, partly))
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name]) for name in ours)
    own, given = (dict(e.encoders.text.vlm.named_parameters()) for e in (partly, editor))
    assert {n for n in own if not torch.equal(own[n], given[n])} == {n.removeprefix("planner.") for n in vision}


@pytest.mark.parametrize("alpha", [0.0, 3.0])
def test_adapters_are_put_into_the_folder_s_weights(folder, editor, tmp_path, alpha):
    layer = "transformer_blocks.1.img_mlp.net.2"
    down, up = torch.randn(4, 512), torch.randn(128, 4)
    factors = {f"ema.{layer}.lora_A.weight": down, f"ema.{layer}.lora_B.weight": up}
    weights = read_safetensors(folder / "transformer")
    record = {"dtype": "float32", "fingerprint": fingerprint((n, t.float()) for n, t in weights.items())}
    run = make_run(tmp_path / "adapters", folder, factors, {"base": record})
    settings = {"lora_rank": 4, "lora_alpha": alpha, "lora_targets": [layer]}
    (run / "config.json").write_text(json.dumps({"model": str(folder), "train": "renderer", **settings, **AREAS}))
    merged = QwenImageEditor(run, **SETTINGS).network
    x = torch.randn(5, 512)
    base, changed = (n.get_submodule(layer)(x) for n in (editor.network, merged))
    torch.testing.assert_close(changed - base, (alpha or 4) / 4 * (x @ down.T @ up.T), atol=1e-3, rtol=1e-4)
    same = {n for n, p in merged.named_parameters() if torch.equal(p, editor.network.get_parameter(n))}
    assert same == {n for n, _ in merged.named_parameters()} - {f"{layer}.weight"}


def test_a_plan_that_is_none_is_reported(folder, caplog):
    editor = QwenImageEditor(folder, max_plan_tokens=4, **SETTINGS, **AREAS)
    with caplog.at_level(logging.WARNING, "edit"):
        assert editor.edit(random_picture(96, 96, seed=0), "Remove the dog.").plan is None
    assert "no plan" in caplog.text


def test_a_refused_instruction_is_never_drawn(editor, tmp_path, monkeypatch):
    words = tmp_path / "words.txt"
    words.write_text("cigarette\n香烟\n", "utf-8")
    monkeypatch.setattr(editor, "words", edit.WordFilter.from_file(words))
    monkeypatch.setattr(editor, "network", None)
    picture = random_picture(96, 96, seed=0)
    for instruction in ("add a cigarette", "加上香烟"):
        with pytest.raises(RefusedInstructionError):
            editor.edit_many([EditRequest("Remove the dog.", [picture]), EditRequest(instruction, [picture])])


def test_bad_requests_are_named(editor, folder, tmp_path):
    picture = random_picture(96, 96, seed=0)
    (tmp_path / "broken.png").write_bytes(b"\x89PNG no more")
    for arguments, message in [
        (([picture] * 4, "x"), "at most 3 references, got 4"),
        ((np.asarray(picture), "x"), "a path or a PIL picture, got ndarray"),
        ((picture, None), "an instruction is a text, got NoneType"),
        ((picture, " \n"), "instruction is empty"),
        (([], "x"), "width and height"),
        ((picture, "x", 64, 0), "width and height"),
        ((picture, "x", 64, 65), "multiples of 16"),
        ((tmp_path / "none.png", "x"), "none.png"),
        (([picture, str(tmp_path / "broken.png")], "x"), "broken.png"),
        ((picture.resize((4000, 4)), "x"), "too thin"),
    ]:
        with pytest.raises(ValueError, match=message):
            editor.edit(*arguments)
    with pytest.raises(ValueError, match="neither a run folder"):
        QwenImageEditor(tmp_path)
    with pytest.raises(ValueError, match="no valid checkpoint"):
        (tmp_path / "config.json").write_text(json.dumps({"model": str(folder)}))
        QwenImageEditor(tmp_path)
    with pytest.raises(ValueError, match="--weights"):
        QwenImageEditor(folder, weights="best")
    other = renderer_of(folder, "ema.") | {"ema.transformer_blocks.0.attn.to_qkv.weight": torch.zeros(2, 128)}
    with pytest.raises(ValueError, match="to_qkv.*give a run"):
        QwenImageEditor(make_edit_run(tmp_path / "other", folder, other), **SETTINGS)
    other = {"planner.model.visual.merger.mlp.4.weight": torch.zeros(2)}
    with pytest.raises(ValueError, match="planner's weights do not fit.*mlp.4"):
        QwenImageEditor(make_edit_run(tmp_path / "another", folder, other), **SETTINGS)


def test_the_first_edit_model_edits_one_picture(folder, monkeypatch):
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "QwenImageEditPipeline"}))
    first = QwenImageEditor(folder, plan=False, **SETTINGS, reference_pixels=AREA)
    assert first.condition_pixels == AREA  # both networks see the same picture
    with pytest.raises(ValueError, match="exactly one picture"):
        first.edit([random_picture(96, 96, seed=0)] * 2, "x")
    shutil_index = json.loads((TINY / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(shutil_index))


def test_the_command_line(folder, tmp_path, capsys):
    paths = [tmp_path / "a.png", tmp_path / "b.png"]
    for i, path in enumerate(paths):
        random_picture(96, 96, seed=i).save(path)
    cfg = edit.Config(
        model=str(folder), image=tuple(map(str, paths)), instruction=("Remove the dog.", "把红苹果换成狗脸"),
        num_steps=2, cfg_scale=1.0, max_plan_tokens=3, output=str(tmp_path / "out"), dtype="float32", **AREAS,
    )  # fmt: skip
    edit.main(cfg)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "000.json", "000.png", "001.json", "001.png", "grid.png",
    ]  # fmt: skip
    assert json.loads((tmp_path / "out/001.json").read_text("utf-8")) == {
        "instruction": "把红苹果换成狗脸", "plan": None,
    }  # fmt: skip
    editor = QwenImageEditor(folder, plan=False, **SETTINGS | {"num_steps": 2, "cfg_scale": 1.0}, **AREAS)
    expected = editor.edit(paths, "把红苹果换成狗脸").image
    assert abs(pixels(Image.open(tmp_path / "out/001.png")) - pixels(expected)).max() <= 1
    assert "把红苹果换成狗脸  →  no plan" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--instruction"):
        edit.main(edit.Config(model=str(folder)))
    with pytest.raises(ValueError, match="--cfg_scale must be a number, got nan"):
        edit.main(edit.Config(model=str(folder), instruction=("x",), cfg_scale=float("nan")))
    with pytest.raises(ValueError, match="finite cfg_scale, got 50 and inf"):
        edit.main(edit.Config(model=str(folder), instruction=("x",), cfg_scale=float("inf")))
