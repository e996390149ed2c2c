"""Recipe of the tiny vision tower: what its tokens say is what the frozen language model's words say.

The tower of Qwen2.5-VL stands in for a pretrained one, so it may see every emoji.  The language model, its embeddings
and the tokenizer stay as `tools.tiny_text` made them, bit by bit.  By contrast (InfoNCE, arXiv 1807.03748) the mean
state of the tokens where a thing lies is to be nearest to that of its name among all names, in both languages, and the
mean state of a whole picture to that of its caption among the batch's; a small next-token loss asks for the caption
after the picture.  Then its tokens learn to say where the thing lies that they show: a linear layer, thrown away
afterwards, is to read the thing's box from each.  What made it learn within minutes: matrices stepped by Muon, patches
whitened from the start, and tokens of a size at which the first layer does not drown them.

Called by `python -m tools.make_tiny --part vision`.
"""

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from data.emoji_table import Emoji, load_emoji
from model.vision_input import VisionGeometry
from tools.tiny_boxes import box_errors, state_at
from tools.tiny_reader import TinyReader
from tools.tiny_scenes import Scene, draw, emoji_lists, random_scene
from utils.muon import Muon

TOWER = {"depth": 2, "hidden_size": 128, "intermediate_size": 384, "num_heads": 4, "fullatt_block_indexes": [1]}
_VISUAL = "visual."
_TEMPERATURE = 0.05
_MATRIX_LR, _OTHER_LR = 8e-3, 1e-3  # at their peak
_PICTURE_SCALE = 10.0  # of a picture's tokens when training starts, against words: above what the first layer adds
# Of each phase: steps, learning rates against those above, shares of pictures of the three lists of `emoji_lists`, and
# the weight of the boxes' error.
_PHASES = [(1250, 1.0, (0.75, 0.0, 0.25), 0.0), (2000, 0.7, (0.5, 0.4, 0.1), 20.0)]


def _contrast(seen: Tensor, said: Tensor, right: Tensor) -> Tensor:
    """Return the cross-entropy of finding each picture's own text, row right[i] of `said`, among all."""
    return F.cross_entropy(seen @ said.T / _TEMPERATURE, right)


def load_with_new_tower(folder: Path, seed: int = 0) -> Qwen2_5_VLForConditionalGeneration:
    """Load `text_encoder/` in float32, frozen, but for a tower of random weights with the sizes of TOWER."""
    config = Qwen2_5_VLConfig.from_pretrained(folder / "text_encoder")
    for name, value in TOWER.items():
        setattr(config.vision_config, name, value)
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(config)
    stored = load_file(folder / "text_encoder/model.safetensors")
    kept = {name: tensor.float() for name, tensor in stored.items() if not name.startswith(_VISUAL)}
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in kept.items()}
    missing, unknown = model.load_state_dict(renamed, strict=False)
    assert not unknown and all(".visual." in name or name == "lm_head.weight" for name in missing), (missing, unknown)
    model.requires_grad_(False)
    _start_tower(model, seed)
    model.model.visual.requires_grad_(True)
    return model


def load_with_tower(folder: Path) -> Qwen2_5_VLForConditionalGeneration:
    """Load `text_encoder/` in float32, frozen but for its tower."""
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder / "text_encoder", dtype=torch.float32)
    model.requires_grad_(False)
    model.model.visual.requires_grad_(True)
    return model


@torch.no_grad()
def _start_tower(model: Qwen2_5_VLForConditionalGeneration, seed: int) -> None:
    """Start a tower where a narrow one learns: with weights of the size of its width, and patches told apart.

    The library's 0.02 is for wide layers.  Patches of pictures differ little from their mean, which no bias takes away;
    the first layer begins as their whitened principal components, none of which sees the mean.
    """
    tower, generator = model.model.visual, torch.Generator().manual_seed(seed)
    for parameter in tower.parameters():
        if parameter.ndim == 2:
            parameter.normal_(std=parameter.shape[1] ** -0.5, generator=generator)
    tower.merger.mlp[-1].weight.mul_(_PICTURE_SCALE * model.get_input_embeddings().weight.square().mean().sqrt())
    rng, emoji = random.Random(seed), list(load_emoji().values())
    geometry = VisionGeometry.from_config(model.config.vision_config.to_dict())
    patches, _ = geometry.patches([random_scene(rng, emoji).pixels for _ in range(400)])
    mean = F.normalize(patches.mean(0), dim=0)
    centred = patches - patches.mean(0)
    centred = centred - (centred @ mean)[:, None] * mean
    _, spread, components = torch.linalg.svd(centred, full_matrices=False)
    num = tower.patch_embed.proj.weight.shape[0]
    whitened = components[:num] * (len(patches) ** 0.5 / spread[:num])[:, None]
    tower.patch_embed.proj.weight.copy_(whitened.view_as(tower.patch_embed.proj.weight))


def train_vision(folder: Path, tokenizer: PreTrainedTokenizerBase, batch: int = 48) -> None:
    """Train the tower of a released folder on the CPU, twenty minutes of one core; each phase ends in its file."""
    for phase in range(len(_PHASES)):
        model = load_with_new_tower(folder) if phase == 0 else load_with_tower(folder)
        _train_phase(model, tokenizer, phase, batch)
        save_vision(model, folder)


def _train_phase(
    model: Qwen2_5_VLForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, phase: int, batch: int
) -> None:
    num_steps, share_of_lr, shares, box_weight = _PHASES[phase]
    rng, reader, lists = random.Random(phase), TinyReader(model, tokenizer), emoji_lists()
    everyone = lists[-1]
    number = {e.char: i for i, e in enumerate(everyone)}
    names = [reader.of_texts([e.en for e in everyone]), reader.of_texts([e.zh for e in everyone])]
    trained = list(model.model.visual.parameters())
    matrices, others = [p for p in trained if p.ndim == 2], [p for p in trained if p.ndim != 2]
    box_reader = nn.Linear(model.config.vision_config.out_hidden_size, 4)
    others += box_reader.parameters()
    optimizers = [
        Muon(matrices, share_of_lr * _MATRIX_LR, weight_decay=0.01),
        torch.optim.AdamW(others, lr=share_of_lr * _OTHER_LR, betas=(0.9, 0.98), weight_decay=0.01),
    ]
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(o, o.param_groups[0]["lr"], num_steps, pct_start=0.1, cycle_momentum=False)
        for o in optimizers
    ]
    start = time.process_time()
    for step in range(num_steps):
        scenes = [random_scene(rng, rng.choices(lists, shares)[0]) for _ in range(batch)]
        captions = [rng.choice(scene.captions[rng.choice(["en", "zh"])]) for scene in scenes]
        grids, tokens, language = reader.of_pictures([scene.pixels for scene in scenes], captions)
        things = [(grid, scene, *thing) for grid, scene in zip(grids, scenes, strict=True) for thing in scene.things]
        seen = torch.stack([state_at(grid, box, *scene.pixels.shape[1:]) for grid, scene, _, box in things])
        right = torch.tensor([number[thing.char] for *_, thing, _ in things])
        local = sum(_contrast(seen, said, right) for said in names) / 2
        whole = torch.stack([F.normalize(grid.mean((0, 1)), dim=-1) for grid in grids])
        overall = _contrast(whole, reader.of_texts(captions), torch.arange(batch))
        box_error, far_off = box_errors(box_reader, tokens, scenes)
        loss = local + 0.3 * overall + 0.1 * language + box_weight * box_error
        for parameter in (*trained, *box_reader.parameters()):
            parameter.grad = None
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        if step % 25 == 0 or step == num_steps - 1:
            found = (seen.detach() @ names[0].T).argmax(1) == right
            print(
                f"vision phase {phase} step {step}/{num_steps} things {local.item():.3f} ({found.float().mean():.0%} "
                f"found) scenes {overall.item():.3f} next token {language.item():.3f} "
                f"boxes {far_off.item():.0%} far off {time.process_time() - start:.0f} s of CPU",
                flush=True,
            )


@torch.no_grad()
def picture_retrieval(
    model: Qwen2_5_VLForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, emoji: Sequence[Emoji], seed: int = 1
) -> dict[str, float]:
    """Return how often the nearest of all the names is the right one, by mean states.

    en, zh: of single emoji that fill 96 x 96 pixels.  place: of both things in pictures of two of them, each by the
    tokens where it lies, with the English names.
    """
    reader, rng = TinyReader(model, tokenizer), random.Random(seed)

    def said(names: list[str]) -> Tensor:
        return torch.cat([reader.of_texts(names[i : i + 128]) for i in range(0, len(names), 128)])

    def seen(scenes: list[Scene]) -> Tensor:
        rows = []
        for i in range(0, len(scenes), 128):
            part = scenes[i : i + 128]
            grids, *_ = reader.of_pictures([scene.pixels for scene in part], [""] * len(part))
            for grid, scene in zip(grids, part, strict=True):
                rows += [state_at(grid, box, *scene.pixels.shape[1:]) for _, box in scene.things]
        return torch.stack(rows)

    number = {e.char: i for i, e in enumerate(emoji)}
    drawn = [draw((96, 96), [(e, 48, 48, 96)], "white") for e in emoji]
    singles = [Scene(pixels, {}, things) for pixels, things in drawn]
    pairs = [scene for scene in (random_scene(rng, emoji) for _ in range(600)) if len(scene.things) == 2]
    english = said([e.en for e in emoji])
    found = {}
    for name, scenes, texts in (
        ("en", singles, english), ("zh", singles, said([e.zh for e in emoji])), ("place", pairs, english),
    ):  # fmt: skip
        right = torch.tensor([number[thing.char] for scene in scenes for thing, _ in scene.things])
        found[name] = ((seen(scenes) @ texts.T).argmax(1) == right).float().mean().item()
    return found


def save_vision(model: Qwen2_5_VLForConditionalGeneration, folder: Path) -> None:
    """Put the tower into `text_encoder/` (bfloat16), where every other tensor stays as it is."""
    path = folder / "text_encoder/model.safetensors"
    kept = {name: tensor for name, tensor in load_file(path).items() if not name.startswith(_VISUAL)}
    tower = model.model.visual.state_dict()
    save_file(
        kept | {_VISUAL + name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tower.items()}, path,
        metadata={"format": "pt"},
    )  # fmt: skip
    path = folder / "text_encoder/config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["vision_config"] |= TOWER
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
