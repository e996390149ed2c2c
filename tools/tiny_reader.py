"""Reads texts, and pictures with a text after them, for the recipes of the tiny model: one pass for a batch."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerBase, Qwen2_5_VLForConditionalGeneration

from model.templates import (
    EDIT_PREFIX,
    PICTURE_LABEL,
    SUFFIX,
    TEXT_TO_IMAGE_PREFIX,
    VISION_END,
    VISION_START,
)
from model.text_encoder import TextEncoder
from model.vision_input import VisionGeometry


class TinyReader:
    """A tiny Qwen2.5-VL: states of texts, and of pictures with a text after them.

    is_frozen: whether the language model is; then what the templates begin with is read once, else in every pass.
    """

    def __init__(
        self, model: Qwen2_5_VLForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, is_frozen: bool = True
    ):
        self.model, self.tokenizer = model, tokenizer
        geometry = VisionGeometry.from_config(model.config.vision_config.to_dict())
        self.text = TextEncoder(tokenizer, model.model.language_model, "", model, geometry)
        self._is_frozen = is_frozen
        self._prefixes: dict[str, tuple[list[int], list[tuple[Tensor, Tensor]]]] = {}

    def _prefix(self, prefix: str) -> tuple[list[int], list[tuple[Tensor, Tensor]]]:
        """Return a prefix's ids and its keys and values in each layer: no later token changes them."""
        if not self._is_frozen:
            return self._read_prefix(prefix)
        if prefix not in self._prefixes:
            with torch.no_grad():
                self._prefixes[prefix] = self._read_prefix(prefix)
        return self._prefixes[prefix]

    def _read_prefix(self, prefix: str) -> tuple[list[int], list[tuple[Tensor, Tensor]]]:
        ids, cache = self.tokenizer(prefix)["input_ids"], DynamicCache()
        self.model.model.language_model(input_ids=torch.tensor([ids]), cache=cache, use_cache=True)
        return ids, [(layer.keys, layer.values) for layer in cache.layers]

    def read(
        self, prefix: str, rows: list[list[int]], pictures: Sequence[Tensor] = ()
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return ids, states and the mask of what is real, (rows, longest) each, of what follows a prefix.

        And the tower's tokens of all pictures, (tokens, width).
        """
        start, kept = self._prefix(prefix)
        inputs = self.text.model_inputs([start + row for row in rows], pictures)
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        own = slice(len(start), None)
        embedded = self.model.get_input_embeddings()(ids[:, own])
        positions, seen = None, embedded.new_zeros(0, embedded.shape[-1])
        if len(pictures):
            grid = inputs["image_grid_thw"]
            seen = self.model.model.visual(inputs["pixel_values"], grid_thw=grid).pooler_output
            is_picture = (ids[:, own] == self.text.image_pad)[..., None]
            embedded = embedded.masked_scatter(is_picture, seen)
            positions, _ = self.model.model.get_rope_index(
                ids, image_grid_thw=grid, attention_mask=mask, mm_token_type_ids=inputs["mm_token_type_ids"]
            )
            positions = positions[..., own]
        cache = DynamicCache([(k.expand(len(rows), -1, -1, -1), v.expand(len(rows), -1, -1, -1)) for k, v in kept])
        states = self.model.model.language_model(
            inputs_embeds=embedded, attention_mask=mask, position_ids=positions, cache=cache, use_cache=True
        ).last_hidden_state
        return ids[:, own], states, mask[:, own].bool(), seen

    def grid(self, picture: Tensor) -> tuple[int, int]:
        """Return the rows and columns of a picture's tokens; picture: uint8 (3, H, W)."""
        _, height, width = self.text.geometry.grid(*picture.shape[1:])
        merge = self.text.geometry.merge_size
        return height // merge, width // merge

    def picture_ids(self, picture: Tensor) -> list[int]:
        """Return the ids that stand for one picture, its label and marks included, after the prefix of edits."""
        label = self.tokenizer(PICTURE_LABEL.format(number=1) + VISION_START)["input_ids"]
        pads = [self.text.image_pad] * math.prod(self.grid(picture))
        return label + pads + self.tokenizer(VISION_END)["input_ids"]

    def of_texts(self, texts: Sequence[str]) -> Tensor:
        """Return the mean states of captions, unit norm, (texts, width)."""
        _, states, mask, _ = self.read(TEXT_TO_IMAGE_PREFIX, [self.tokenizer(t + SUFFIX)["input_ids"] for t in texts])
        return F.normalize((states * mask[..., None]).sum(1), dim=-1)

    def of_pictures(
        self, pictures: Sequence[Tensor], captions: Sequence[str]
    ) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Return of each picture states and the tower's tokens, (rows, columns, width), and its caption's loss."""
        grids = [self.grid(picture) for picture in pictures]
        rows = [
            self.picture_ids(picture) + self.tokenizer(caption + SUFFIX)["input_ids"]
            for picture, caption in zip(pictures, captions, strict=True)
        ]
        ids, states, mask, tokens = self.read(EDIT_PREFIX, rows, pictures)
        is_picture = ids == self.text.image_pad
        per_picture, seen = (
            [own.view(*grid, -1) for own, grid in zip(part.split([math.prod(g) for g in grids]), grids, strict=True)]
            for part in (states[is_picture], tokens)
        )
        # Of the caption: what the picture should tell.  The mark after the picture says that it begins.
        started = (ids == self.tokenizer.convert_tokens_to_ids(VISION_END)).cumsum(1).bool()
        is_caption = started[:, :-1] & mask[:, 1:]
        language = F.cross_entropy(self.model.lm_head(states[:, :-1][is_caption]), ids[:, 1:][is_caption])
        return per_picture, seen, language
