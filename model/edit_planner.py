"""The planner: Qwen2.5-VL answers pictures and an instruction with a plan, and its states guide the renderer.

The plan is the assistant's answer in the very chat whose user turn gives the text states.  The model is causal, so one
pass gives both: the states know nothing of the answer.

Legend: B samples, T_b text states of a sample, D their width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache

from model.templates import END_OF_TURN
from model.text_encoder import TextEncoder

# The parts whose matrices an optimizer for hidden layers (Muon) steps: neither embeddings nor the first layer.
HIDDEN_LAYERS = ("vlm.model.language_model.layers.*", "vlm.model.visual.blocks.*", "vlm.model.visual.merger")
_ROWS_AT_A_TIME = 8  # of like length, so that few tokens are filling
_LOGITS_AT_A_TIME = 128


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
        num_shared = min(edits[0].start, len(commonprefix(rows)))  # a line end may join that of the prefix
        states = self._states(rows, num_shared, pictures)

        # The state before each token of an answer predicts it.
        lengths = [len(answer) for answer in answers]
        before = [own[len(own) - n - 1 : len(own) - 1] for own, n in zip(states, lengths, strict=True)]
        labels = torch.tensor([token for answer in answers for token in answer], device=states[0].device).long()
        losses, correct = (values.split(lengths) for values in self._judge(torch.cat(before), labels))
        loss = torch.stack([own.mean() if len(own) else own.sum() for own in losses])
        has_answer = torch.tensor([s.answer is not None for s in samples], device=loss.device)
        if self._trains_vision and not pictures and torch.is_grad_enabled():
            loss = loss + self._nothing_seen()
        texts = [row[e.start - num_shared : e.stop - num_shared] for row, e in zip(states, edits, strict=True)]
        return PlannerOutput(loss, has_answer, has_answer & torch.stack([own.all() for own in correct]), texts)

    def _judge(self, states: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cross-entropy of each token after its state, float32, and whether it is the most likely one.

        states: (tokens, D); labels: (tokens,).  A part at a time, whose logits stay in the processor's cache.
        """
        losses, correct = [], []
        for some, right in zip(states.split(_LOGITS_AT_A_TIME), labels.split(_LOGITS_AT_A_TIME), strict=True):
            logits = self.vlm.lm_head(some).float()  # (tokens, V)
            losses.append(F.cross_entropy(logits, right, reduction="none"))
            correct.append(logits.detach().argmax(dim=-1) == right)
        return torch.cat(losses), torch.cat(correct)

    def _states(self, rows: Sequence[list[int]], start: int, pictures: Sequence[Tensor]) -> list[Tensor]:
        """Return what each row of token ids becomes after its first `start` ones, which all share: (tokens, D) each.

        The model is causal, so the shared ones are read once; rows of like length go through it together.
        """
        model, inputs = self.vlm.model, self.text.model_inputs(rows, pictures)
        ids, positions = inputs["input_ids"], None
        embedded = model.get_input_embeddings()(ids)
        if pictures:
            seen = model.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"]).pooler_output
            embedded = embedded.masked_scatter((ids == self.text.image_pad)[..., None], seen.to(embedded.dtype))
            grids, kinds = inputs["image_grid_thw"], inputs["mm_token_type_ids"]
            positions, _ = model.get_rope_index(ids, kinds, grids, attention_mask=inputs["attention_mask"])
            positions = positions[..., start:]
        shared = DynamicCache(config=model.language_model.config)
        model.language_model(inputs_embeds=embedded[:1, :start], cache=shared, use_cache=True)
        kept = [(layer.keys, layer.values) for layer in shared.layers]

        states: list[Tensor] = [embedded[0]] * len(rows)
        by_length = sorted(range(len(rows)), key=lambda b: len(rows[b]))
        for first in range(0, len(rows), _ROWS_AT_A_TIME):
            chosen = by_length[first : first + _ROWS_AT_A_TIME]
            stop, of_all = len(rows[chosen[-1]]), (len(chosen), -1, -1, -1)
            # No mask: no token sees the filling, which is on the right.
            read = model.language_model(
                inputs_embeds=embedded[chosen, start:stop],
                position_ids=None if positions is None else positions[:, chosen, : stop - start],
                cache=DynamicCache([(keys.expand(of_all), values.expand(of_all)) for keys, values in kept]),
                use_cache=True,
            ).last_hidden_state
            for b, row in zip(chosen, read, strict=True):
                states[b] = row[: len(rows[b]) - start]
        return states

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


def backward_through_states(loss: Tensor, states: Sequence[Tensor], guides: Sequence[Tensor]) -> None:
    """Run the planner's backward: of its own loss, (), and of what the renderer's backward left in its guides.

    states: (T_b, D) each, of `PlannerOutput`; guides: the same, detached, as the renderer read them; one without a
    gradient adds nothing.  The renderer's backward comes first, on every rank, so all gradients travel in one order.
    """
    told = [(own, guide.grad) for own, guide in zip(states, guides, strict=True) if guide.grad is not None]
    torch.autograd.backward([loss, *(own for own, _ in told)], [None, *(gradient for _, gradient in told)])


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
