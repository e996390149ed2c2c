"""Recipe of the tiny text encoder's third lesson: to find in a picture what is called by its name.

Qwen2.5-VL, which it stands in for, points at things when asked.  Three losses teach it.  Two heads of the last layer
are told where to look while a name is read and its box written: the negative logarithm of the attention that falls on
the thing.  From the states there a linear layer, thrown away afterwards, is to read the thing's box.  The answer itself
is learned by next token; that loss alone found no names within 1000 steps, and with the first one too it looked at the
right thing and still told either box, since which of two is one bit among all those of the digits.  The vision tower
stays as it is, and so, by distillation, do the states of captions and of pictures, which the MMDiT and the tower have
learned from.

Called by `python -m tools.make_tiny --part grounding`.
"""

import copy
import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedTokenizerBase, Qwen2_5_VLForConditionalGeneration
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from model.edit_planner import generate_plan
from model.templates import EDIT_PREFIX, END_OF_TURN, SUFFIX, TEXT_TO_IMAGE_PREFIX
from model.text_encoder import TextEncoder
from tools.tiny_boxes import FAR_OFF, covered
from tools.tiny_questions import Question, ask, asked_scene
from tools.tiny_reader import TinyReader
from tools.tiny_scenes import Scene, emoji_lists, random_scene
from utils.muon import Muon

HEADS = (0, 1)  # of the last layer, that look; they share one head of keys and values
_SHARES = (0.3, 0.6, 0.1)  # of the pictures: of the three lists of `emoji_lists`
_MATRIX_LR, _OTHER_LR = 8e-3, 1e-3  # at their peak
_LOOKING, _PLACE, _KEEPING = 1.0, 20.0, 10.0  # weights of their losses
_SAID = 3.0  # of captions' states against pictures', where states are kept: the MMDiT reads them
_INTERFACE = "last_layer_seen"


class LastAttention:
    """Queries, (B, heads, T, Dh), and keys, (B, heads, S, Dh), of a language model's last layer in the latest pass."""

    def __init__(self, model: Qwen2_5_VLForConditionalGeneration):
        self._config = model.config.get_text_config()
        self._last = self._config.num_hidden_layers - 1
        self.query = self.key = torch.empty(0)
        self.scaling = 1.0

    @contextmanager
    def following(self) -> Iterator[None]:
        """Note them in every pass inside."""

        def attend(module, query, key, value, attention_mask, **kwargs):
            if module.layer_idx == self._last:
                self.query, self.key, self.scaling = query, key, module.scaling
            return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

        AttentionInterface.register(_INTERFACE, attend)
        AttentionMaskInterface.register(_INTERFACE, sdpa_mask)
        before, self._config._attn_implementation = self._config._attn_implementation, _INTERFACE
        try:
            yield
        finally:
            self._config._attn_implementation = before

    def weights(self, rows: Tensor, places: Tensor) -> Tensor:
        """Return what HEADS attend to from some tokens, (N, len(HEADS), S).

        rows, places: (N,) each, the sample and the number among its T queries, the last of which is the last key.
        """
        heads = torch.tensor(HEADS)
        query = self.query[rows[:, None], heads, places[:, None]]  # (N, heads, Dh)
        key = self.key[:, heads // (self.query.shape[1] // self.key.shape[1])][rows]  # (N, heads, S, Dh)
        scores = torch.einsum("nhd,nhsd->nhs", query, key) * self.scaling
        num_before = self.key.shape[2] - self.query.shape[2]
        unseen = torch.arange(self.key.shape[2]) > (places + num_before)[:, None]
        return scores.masked_fill(unseen[:, None], float("-inf")).softmax(-1)


class Look(NamedTuple):
    """A token at which one has to know where a thing is."""

    row: int
    number: int  # of the token in its row
    cover: Tensor  # how much the thing covers each of the picture's tokens, (tokens,) in 0 to 1
    box: Tensor  # left, top, right, bottom in the picture's sides, (4,)


def _tokens_of(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[int]]:
    """Return a text's ids, and of each the last character that it covers."""
    encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
    return encoded["input_ids"], [stop - 1 for _, stop in encoded["offset_mapping"]]


def lay_out(
    reader: TinyReader, scenes: Sequence[Scene], questions: Sequence[Question]
) -> tuple[list[list[int]], list[int], list[Look]]:
    """Return each row's ids after the prefix, the number of those of its answer, and where what is to be looked at."""
    rows, num_answer, looks = [], [], []
    for number, (scene, question) in enumerate(zip(scenes, questions, strict=True)):
        picture = reader.picture_ids(scene.pixels)
        text, text_ends = _tokens_of(reader.tokenizer, question.text + SUFFIX)
        answer, answer_ends = _tokens_of(reader.tokenizer, question.answer + END_OF_TURN)
        rows.append(picture + text + answer)
        num_answer.append(len(answer))
        for is_answer, first, last, thing in question.looks:
            ends, start = (answer_ends, len(picture) + len(text)) if is_answer else (text_ends, len(picture))
            box, sides = scene.things[thing][1], torch.tensor(scene.pixels.shape[1:])
            cover = covered(box, *scene.pixels.shape[1:], *reader.grid(scene.pixels)).flatten()
            place = torch.tensor(box) / sides.flip(0).repeat(2)
            begin = next(i for i, end in enumerate(ends) if end >= first)  # its token may go on beyond the name
            stop = len(ends) if last is None else max(begin + 1, sum(end <= last for end in ends))
            looks += [Look(number, start + i, cover, place) for i in range(begin, stop)]
    return rows, num_answer, looks


def _indices(looks: list[Look]) -> tuple[Tensor, Tensor]:
    return torch.tensor([look.row for look in looks]), torch.tensor([look.number for look in looks])


def looking_loss(attention: LastAttention, ids: Tensor, image_pad: int, looks: list[Look]) -> Tensor:
    """Return the mean negative logarithm of the attention of HEADS that falls on the things, ().

    ids: (rows, T) of the latest pass.
    """
    rows, numbers = _indices(looks)
    weights = attention.weights(rows, numbers)
    on_thing = torch.zeros(len(looks), weights.shape[-1])
    num_before = weights.shape[-1] - ids.shape[1]
    for own, look in zip(on_thing, looks, strict=True):
        own[num_before:][ids[look.row] == image_pad] = look.cover
    return -(weights * on_thing[:, None]).sum(-1).clamp(min=1e-6).log().mean()


def _moved(states: Tensor, before: Tensor) -> Tensor:
    """Return how far states have moved, as a share of their size squared, ()."""
    return (states - before).square().mean() / before.square().mean()


def train_grounding(folder: Path, tokenizer: PreTrainedTokenizerBase, num_steps: int = 2400, batch: int = 32) -> None:
    """Train the language model of a released folder on the CPU, about half an hour, and write it there in bfloat16."""
    torch.manual_seed(0)
    rng, lists = random.Random(0), emoji_lists()
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder / "text_encoder", dtype=torch.float32)
    teacher = TinyReader(copy.deepcopy(model).requires_grad_(False), tokenizer)
    model.model.visual.requires_grad_(False)
    reader, attention = TinyReader(model, tokenizer, is_frozen=False), LastAttention(model)
    trained = list(model.model.language_model.named_parameters())
    matrices = [p for name, p in trained if p.ndim == 2 and name.startswith("layers.")]
    others = [p for name, p in trained if not (p.ndim == 2 and name.startswith("layers."))]
    box_reader = nn.Linear(model.config.get_text_config().hidden_size, 4)
    others += box_reader.parameters()
    optimizers = [
        Muon(matrices, _MATRIX_LR, weight_decay=0.01),
        torch.optim.AdamW(others, lr=_OTHER_LR, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(o, o.param_groups[0]["lr"], num_steps, pct_start=0.1, cycle_momentum=False)
        for o in optimizers
    ]
    start = time.process_time()
    for step in range(num_steps):
        scenes = [asked_scene(rng, lists, _SHARES) for _ in range(batch)]
        captions = [rng.choice(scene.captions[rng.choice(["en", "zh"])]) for scene in scenes]
        said = [tokenizer(caption + SUFFIX)["input_ids"] for caption in captions]
        rows, num_answer, looks = lay_out(reader, scenes, [ask(rng, scene) for scene in scenes])
        pictures = [scene.pixels for scene in scenes]
        with torch.no_grad():
            _, said_before, _, _ = teacher.read(TEXT_TO_IMAGE_PREFIX, said)
            shown, seen_before, _, _ = teacher.read(EDIT_PREFIX, [reader.picture_ids(p) for p in pictures], pictures)
        _, said_states, is_said, _ = reader.read(TEXT_TO_IMAGE_PREFIX, said)
        with attention.following():
            ids, states, _, _ = reader.read(EDIT_PREFIX, rows, pictures)
            looking = looking_loss(attention, ids, reader.text.image_pad, looks)
        is_seen, was_seen = ids == reader.text.image_pad, shown == reader.text.image_pad
        said_moved = _moved(said_states[is_said], said_before[is_said])
        seen_moved = _moved(states[is_seen], seen_before[was_seen])
        keeping = _SAID * said_moved + seen_moved
        before = [slice(len(row) - n - 1, len(row) - 1) for row, n in zip(rows, num_answer, strict=True)]
        logits = [model.lm_head(own[part]) for own, part in zip(states, before, strict=True)]
        labels = [own[part.start + 1 : part.stop + 1] for own, part in zip(ids, before, strict=True)]
        language = F.cross_entropy(torch.cat(logits), torch.cat(labels))
        told = box_reader(F.rms_norm(states[_indices(looks)], states.shape[-1:]))
        errors = told - torch.stack([look.box for look in looks])
        loss = language + _LOOKING * looking + _PLACE * errors.square().mean() + _KEEPING * keeping
        for parameter in (*matrices, *others):
            parameter.grad = None
        loss.backward()
        torch.nn.utils.clip_grad_norm_([*matrices, *others], 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        if step % 25 == 0 or step == num_steps - 1:
            right = [torch.equal(own.argmax(-1), label) for own, label in zip(logits, labels, strict=True)]
            far_off = (errors.abs().amax(-1) > FAR_OFF).float().mean()
            print(
                f"grounding step {step}/{num_steps} looking {looking.item():.3f} boxes {far_off.item():.0%} far off "
                f"next token {language.item():.3f} ({sum(right) / batch:.0%} of the answers right) "
                f"states moved {keeping.item():.4f} {time.process_time() - start:.0f} s of CPU",
                flush=True,
            )
    save_language(model, folder)


def save_language(model: Qwen2_5_VLForConditionalGeneration, folder: Path) -> None:
    """Put the language model into `text_encoder/` (bfloat16), where the vision tower stays as it is."""
    path = folder / "text_encoder/model.safetensors"
    tensors = load_file(path)
    for name, tensor in model.model.language_model.state_dict().items():
        assert tensors[f"model.{name}"].shape == tensor.shape
        tensors[f"model.{name}"] = tensor.to(torch.bfloat16).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


@torch.no_grad()
def pointing(text: TextEncoder, num_scenes: int = 200, seed: int = 1) -> dict[str, float]:
    """Return how often the box told for one of two things, asked for by its name, is the right one, by language.

    Right: the answer is the list asked for, and box and truth share at least half of what both cover together.
    """
    rng, (_, staged, _) = random.Random(seed), emoji_lists()
    right: dict[str, list[bool]] = {"en": [], "zh": []}
    while len(right["en"]) < num_scenes:
        scene = random_scene(rng, staged)
        if len(scene.things) < 2:
            continue
        number = rng.randrange(2)
        for language, own in right.items():
            question = ask(rng, scene, [number], language)
            answer = generate_plan(text, question.text, [scene.pixels], max_new_tokens=64)
            own.append(_is_right(answer, json.loads(question.answer)[0]["bbox_2d"]))
    return {language: sum(own) / len(own) for language, own in right.items()}


def _is_right(answer: str, box: list[int]) -> bool:
    try:
        (entry,) = json.loads(answer)
        left, top, right, bottom = map(int, entry["bbox_2d"])
    except (ValueError, TypeError, KeyError, OverflowError):
        return False
    both = max(min(right, box[2]) - max(left, box[0]), 0) * max(min(bottom, box[3]) - max(top, box[1]), 0)
    areas = (right - left) * (bottom - top) + (box[2] - box[0]) * (box[3] - box[1])
    return both >= 0.5 * (areas - both)
