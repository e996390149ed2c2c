"""The planner: Qwen2.5-VL answers pictures and an instruction with a plan, and its states guide the renderer.

The plan is the assistant's answer in the very chat whose user turn gives the text states.  The model is causal, so one
pass gives both: the states know nothing of the answer.

Legend: B samples, T_b text states of a sample, D their width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.templates import END_OF_TURN
from model.text_encoder import TextEncoder

IGNORED = -100  # no answer's token stands here


@dataclass(frozen=True, eq=False)
class PlannerInput:
    """One edit: what is said, what is shown (uint8 (3, H, W) each), and the plan's text, or None if there is none."""

    instruction: str
    pictures: Sequence[Tensor]
    answer: str | None = None


@dataclass(frozen=True, eq=False)
class PlannerOutput:
    """What one pass gives for B samples."""

    loss_per_sample: Tensor  # (B,) float32: mean cross-entropy of the answer's tokens, its end included; 0 without one
    has_answer: Tensor  # (B,) bool
    is_exact: Tensor  # (B,) bool: the most likely token is right everywhere, so greedy decoding gives the answer
    states: list[Tensor]  # (T_b, D) each, as `TextEncoder.encode` gives them


class Planner(nn.Module):
    """Trains the whole model of a text encoder, which sees what is learned."""

    def __init__(self, text: TextEncoder, freeze_vision: bool = False):
        """Make the model trainable: float32 master weights, in place.

        freeze_vision: but for its vision tower.
        """
        super().__init__()
        assert text.vlm is not None, "a text encoder with vision"
        self.vlm = text.vlm.float().requires_grad_()
        self._text = [text]  # not a part of this module: its parameters are those above
        if freeze_vision:
            self.vlm.model.visual.requires_grad_(False)
        self._trains_vision = not freeze_vision

    @property
    def text(self) -> TextEncoder:
        """The text encoder around the same model."""
        return self._text[0]

    def forward(self, samples: Sequence[PlannerInput]) -> PlannerOutput:
        """Read B samples.  Every sample's result is what it would be alone.

        Raises: ValueError for what no text encoder takes; see `TextEncoder.edit_tokens`.
        """
        text = self.text
        edits = [text.edit_tokens(s.instruction, [tuple(p.shape[1:]) for p in s.pictures]) for s in samples]
        answers = [self._answer_tokens(s.answer) for s in samples]
        rows = [edit.ids + answer for edit, answer in zip(edits, answers, strict=True)]
        pictures = [picture for s in samples for picture in s.pictures]
        inputs = text.model_inputs(rows, pictures)
        states = self.vlm.model(**inputs, use_cache=False).last_hidden_state  # (B, longest, D)

        # The state before each token of an answer predicts it.
        labels = torch.full(states.shape[:2], IGNORED, device=states.device)
        for b, (edit, answer) in enumerate(zip(edits, answers, strict=True)):
            labels[b, edit.stop - 1 : edit.stop - 1 + len(answer)] = torch.tensor(answer, dtype=torch.int64)
        is_answer = labels != IGNORED
        logits = self.vlm.lm_head(states[is_answer]).float()  # (tokens of all answers, V)
        losses, correct = torch.zeros(labels.shape, device=states.device), torch.ones_like(is_answer)
        losses[is_answer] = F.cross_entropy(logits, labels[is_answer], reduction="none")
        correct[is_answer] = logits.argmax(dim=-1) == labels[is_answer]
        has_answer = is_answer.any(dim=1)
        loss = losses.sum(dim=1) / is_answer.sum(dim=1).clamp(min=1)
        if self._trains_vision and not pictures and torch.is_grad_enabled():
            loss = loss + self._nothing_seen()
        own = [row[edit.start : edit.stop] for row, edit in zip(states, edits, strict=True)]
        return PlannerOutput(loss, has_answer, has_answer & correct.all(dim=1), own)

    def _answer_tokens(self, answer: str | None) -> list[int]:
        return (
            [] if answer is None else self.text.tokenizer(answer + END_OF_TURN, add_special_tokens=False)["input_ids"]
        )

    def _nothing_seen(self) -> Tensor:
        """Return 0, with a gradient of 0 for the vision tower: DDP wants one for every parameter in every pass."""
        side = self.text.geometry.token_pixels
        blank = torch.zeros(3, 2 * side, 2 * side, dtype=torch.uint8)
        patches, grid = self.text.geometry.patches([blank])
        device = next(self.vlm.parameters()).device
        seen = self.vlm.model.visual(patches.to(device), grid_thw=grid.to(device)).pooler_output
        return 0.0 * seen.float().sum()

    @torch.no_grad()
    def generate(self, instruction: str, pictures: Sequence[Tensor], max_new_tokens: int = 512) -> str:
        """Return the most likely plan's text, decoded greedily."""
        return generate_plan(self.text, instruction, pictures, max_new_tokens)


@torch.no_grad()
def generate_plan(text: TextEncoder, instruction: str, pictures: Sequence[Tensor], max_new_tokens: int = 512) -> str:
    """Return a text encoder's most likely answer to an edit, without the end of its turn."""
    tokens = text.edit_tokens(instruction, [tuple(picture.shape[1:]) for picture in pictures])
    end = text.tokenizer.convert_tokens_to_ids(END_OF_TURN)
    generated = text.vlm.generate(
        **text.model_inputs([tokens.ids], pictures), max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=end,
        pad_token_id=end, temperature=None, top_p=None, top_k=None, repetition_penalty=None,
    )  # fmt: skip
    answer = generated[0, len(tokens.ids) :].tolist()
    return text.tokenizer.decode(answer[: answer.index(end)] if end in answer else answer)
