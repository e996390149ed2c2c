"""Qwen2.5-VL as text encoder: a caption, or pictures and an instruction → the language model's last hidden states.

Legend: T text tokens of one caption, with those that pictures become.
Source: `diffusers` QwenImagePipeline._get_qwen_prompt_embeds; for edits that of QwenImageEditPlusPipeline and of
QwenImageEditPipeline.  These two leave the kinds of tokens out of the call, which transformers before 5 worked out
itself; from 5 on pictures then have no rows and columns, and the states are others than the released edit models were
trained with (diffusers #14194).  Here pictures have them.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen2_5_VLForConditionalGeneration
from transformers.utils import logging as transformers_logging

from model.templates import (
    EDIT_PREFIX,
    IMAGE_PAD,
    MAX_TOKENS,
    PICTURE_LABEL,
    SUFFIX,
    TEXT_TO_IMAGE_PREFIX,
    VISION_END,
    VISION_START,
)
from model.vision_input import VisionGeometry

log = logging.getLogger("train")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the library's advice and progress bars; what matters is checked and raised."""
    verbosity, progress = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if progress:
            transformers_logging.enable_progress_bar()


def _load_model(folder: Path, dtype: torch.dtype) -> Qwen2_5_VLForConditionalGeneration:
    """Load a `text_encoder/` folder.  Raises: ValueError if a weight is missing."""
    try:
        model, info = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    except OSError as error:
        raise ValueError(f"{folder} cannot be loaded: {error}") from error
    # The library fills what is missing with random numbers.
    if missing := sorted(map(str, {*info["missing_keys"], *info["mismatched_keys"]})):
        raise ValueError(f"{folder} lacks {len(missing)} weights or has them in another shape, first {missing[0]}")
    return model


def load_vlm(folder: Path, dtype: torch.dtype) -> Qwen2_5_VLForConditionalGeneration:
    """Load the whole model of a `text_encoder/` folder.  Raises: ValueError if a file or a weight is missing."""
    with quiet_transformers():
        return _load_model(folder, dtype)


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load a `tokenizer/` folder.  Raises: ValueError if its files are missing."""
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} holds no tokenizer that can be loaded: {error}") from error


def _tokenizer_id(folder: Path) -> str:
    """Return a hash of all that token counts depend on: the tokenizer's files and our template."""
    templates = (TEXT_TO_IMAGE_PREFIX, SUFFIX, MAX_TOKENS)
    digest = hashlib.sha256(repr(templates).encode())
    for file in sorted(path for path in folder.iterdir() if path.is_file()):
        digest.update(repr((file.name, file.read_bytes())).encode())
    return digest.hexdigest()[:16]


def _is_labelled(model_folder: Path) -> bool:
    """Return whether a folder's edit template numbers the pictures: all but the first edit model's do."""
    path = model_folder / "model_index.json"
    name = json.loads(path.read_text(encoding="utf-8")).get("_class_name") if path.is_file() else None
    return name != "QwenImageEditPipeline"


def _geometry(text_encoder_folder: Path) -> VisionGeometry | None:
    """Return how the model of a `text_encoder/` folder cuts pictures; None if it is none that sees them."""
    path = text_encoder_folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return VisionGeometry.from_config(config["vision_config"]) if "vision_config" in config else None


@dataclass(frozen=True)
class EditTokens:
    """An edit's token ids, and where its text states begin and end among them: the answer follows."""

    ids: list[int]
    start: int
    stop: int


class TextEncoder(nn.Module):
    """Encodes one caption at a time, so that no padding exists.

    num_truncated counts the captions that were longer than the model's limit.
    vlm: the whole model, if it was loaded to see pictures, else None.
    geometry: how pictures are cut, with which edits are counted even where they are not encoded.
    labels_pictures: whether the edit template says "Picture 1: " before the first picture, and so on.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        language_model: nn.Module,
        tokenizer_id: str,
        vlm: Qwen2_5_VLForConditionalGeneration | None = None,
        geometry: VisionGeometry | None = None,
        labels_pictures: bool = True,
    ):
        super().__init__()
        self.tokenizer = tokenizer
        self.language_model = language_model
        self.vlm = vlm
        self.tokenizer_id = tokenizer_id
        self.labels_pictures = labels_pictures
        self.num_truncated = 0
        # Counted on the templates themselves: 34 and 64 tokens with the released tokenizer.
        self.num_prefix_tokens = len(self._tokenize(TEXT_TO_IMAGE_PREFIX))
        self.num_edit_prefix_tokens = len(self._tokenize(EDIT_PREFIX))
        self.image_pad = tokenizer.convert_tokens_to_ids(IMAGE_PAD)
        self.geometry = geometry

    @classmethod
    def from_folder(
        cls,
        model_folder: str | Path,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        with_vision: bool = False,
    ) -> "TextEncoder":
        """Load `tokenizer/` and `text_encoder/` of a released folder, frozen.

        with_vision: the vision tower and the output layer as well, which encoding text alone does without.
        Raises: ValueError if a folder, a file or a weight is missing.
        """
        for name in ("tokenizer", "text_encoder"):
            if not (Path(model_folder) / name).is_dir():
                raise ValueError(f"no {name}/ in {model_folder}; give a folder in the released layout")
        encoder = cls.tokenizer_only(model_folder)
        encoder.load_weights(Path(model_folder) / "text_encoder", device, dtype, with_vision)
        return encoder

    @classmethod
    def tokenizer_only(cls, model_folder: str | Path) -> "TextEncoder":
        """Load `tokenizer/` alone, to count tokens where nothing is encoded; edits too, if `text_encoder/` tells how
        pictures are cut.

        Raises: ValueError if `tokenizer/` is missing.
        """
        folder = Path(model_folder) / "tokenizer"
        if not folder.is_dir():
            raise ValueError(f"no tokenizer/ in {model_folder}; give a folder in the released layout")
        with quiet_transformers():
            return cls(
                _load_tokenizer(folder), nn.Identity(), _tokenizer_id(folder),
                geometry=_geometry(folder.with_name("text_encoder")), labels_pictures=_is_labelled(Path(model_folder)),
            )  # fmt: skip

    def load_weights(self, folder: Path, device: torch.device, dtype: torch.dtype, with_vision: bool = False) -> None:
        """Read the weights of a `text_encoder/` folder.  Raises: ValueError if a file or a weight is missing."""
        with quiet_transformers():
            model = _load_model(folder, dtype)
        self.language_model, self.vlm = model.model.language_model, model if with_vision else None
        self.to(device).eval().requires_grad_(False)

    def drop_weights(self) -> None:
        """Keep the tokenizer alone."""
        self.language_model, self.vlm = nn.Identity(), None

    @property
    def has_weights(self) -> bool:
        """Whether it can encode."""
        return not isinstance(self.language_model, nn.Identity)

    @property
    def edit_tokenizer_id(self) -> str:
        """What `tokenizer_id` is for the token counts of edits: these depend on how pictures are cut, too."""
        parts = (self.tokenizer_id, EDIT_PREFIX, self.labels_pictures and PICTURE_LABEL, self.geometry)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def counts_id(self, with_edits: bool) -> str:
        """What the counts of captions, and of edits, depend on: it names them in an index."""
        return f"{self.tokenizer_id} {self.edit_tokenizer_id}" if with_edits else self.tokenizer_id

    def _tokenize(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _tokens(self, caption: str) -> list[int]:
        """Return the token ids of the filled template, however many."""
        return self._tokenize(TEXT_TO_IMAGE_PREFIX + caption + SUFFIX)

    def count_tokens(self, caption: str, picture_sizes: Sequence[tuple[int, int]] | None = None) -> int:
        """Return T, the number of states that `encode` returns.

        picture_sizes: (height, width) of an edit's references as they are given to `encode`; None = text-to-image.
        """
        if picture_sizes is None:
            return min(len(self._tokens(caption)) - self.num_prefix_tokens, MAX_TOKENS)
        tokens, _ = self._edit_tokens(caption, picture_sizes)
        return tokens.stop - tokens.start

    def edit_tokens(self, instruction: str, picture_sizes: Sequence[tuple[int, int]]) -> EditTokens:
        """Return the filled edit template; an instruction that is too long is cut, and counted.

        What is cut is the end of the instruction, never pictures or the end of the turn.  `diffusers` cuts no edit, so
        that one this long gives other states there.

        Raises: ValueError if the instruction holds a picture's place of its own, or pictures leave no room for it.
        """
        tokens, is_cut = self._edit_tokens(instruction, picture_sizes)
        if is_cut:
            self._note_truncated(instruction)
        return tokens

    def _edit_tokens(self, instruction: str, picture_sizes: Sequence[tuple[int, int]]) -> tuple[EditTokens, bool]:
        if self.geometry is None:
            raise ValueError("text_encoder/config.json has no vision_config, so no edit can be counted or encoded")
        if IMAGE_PAD in instruction:
            raise ValueError(f"the instruction holds {IMAGE_PAD}, which stands for a picture")
        ids = self._tokenize(EDIT_PREFIX)
        start = len(ids)
        if picture_sizes:
            # The marks around a picture are tokens of their own, so text on both sides is tokenized alone.
            for number, size in enumerate(picture_sizes, start=1):
                label = PICTURE_LABEL.format(number=number) if self.labels_pictures else ""
                before, after = self._tokenize(label + VISION_START), self._tokenize(VISION_END)
                ids += [*before, *[self.image_pad] * self.geometry.num_tokens(*size), *after]
            text = self._tokenize(instruction + SUFFIX)
        else:
            whole = self._tokenize(EDIT_PREFIX + instruction + SUFFIX)  # a line end may join that of the prefix
            ids, text = whole[:start], whole[start:]
        room = MAX_TOKENS - (len(ids) - start)
        suffix = self._tokenize(SUFFIX)  # it begins with a token of its own, too
        if room < len(suffix):
            raise ValueError(
                f"{len(picture_sizes)} references of {list(picture_sizes)} pixels leave no room for an instruction "
                f"among {MAX_TOKENS} tokens; make --condition_pixels smaller"
            )
        is_cut = len(text) > room
        if is_cut:
            text = text[: room - len(suffix)] + suffix
        return EditTokens(ids + text, start, len(ids) + len(text)), is_cut

    def _note_truncated(self, caption: str) -> None:
        self.num_truncated += 1
        if self.num_truncated.bit_count() == 1:  # the 1st, 2nd, 4th, 8th …: a collection may have millions
            log.warning("caption cut to %d tokens (%d so far): %.60s…", MAX_TOKENS, self.num_truncated, caption)

    @torch.no_grad()
    def encode(self, caption: str, pictures: Sequence[Tensor] | None = None) -> Tensor:
        """Return the states, (T, joint_attention_dim): last hidden states without the template's prefix.

        pictures: an edit's references, uint8 (3, H, W) each, or an empty list; None = text-to-image.
        A caption beyond MAX_TOKENS is cut, and counted.
        """
        if pictures is not None:
            if self.vlm is None:
                raise ValueError("this text encoder was loaded without its vision tower and encodes no edits")
            tokens = self.edit_tokens(caption, [tuple(picture.shape[1:]) for picture in pictures])
            states = self.vlm.model(**self.model_inputs([tokens.ids], pictures), use_cache=False).last_hidden_state
            return states[0, tokens.start : tokens.stop]
        tokens, limit = self._tokens(caption), self.num_prefix_tokens + MAX_TOKENS
        if len(tokens) > limit:
            self._note_truncated(caption)
        ids = torch.tensor([tokens[:limit]], device=next(self.language_model.parameters()).device)
        # The states after the final norm, as the pipeline's hidden_states[-1]; the output layer is never run.
        states = self.language_model(input_ids=ids, use_cache=False).last_hidden_state
        return states[0, self.num_prefix_tokens :]

    def model_inputs(self, rows: Sequence[Sequence[int]], pictures: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return what the whole model takes for token ids of several samples and all their pictures in order.

        Shorter rows are filled on the right, where no token of a causal model sees the filling.
        """
        device = next(self.vlm.parameters()).device
        lengths = torch.tensor([len(row) for row in rows])
        ids = torch.full((len(rows), int(lengths.max())), self.tokenizer.convert_tokens_to_ids("<|endoftext|>"))
        for i, row in enumerate(rows):
            ids[i, : len(row)] = torch.tensor(row)
        inputs = {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long()}
        if pictures:
            patches, grids = self.geometry.patches(pictures)
            inputs |= {"pixel_values": patches, "image_grid_thw": grids}
            inputs["mm_token_type_ids"] = (ids == self.image_pad).int()  # without it, pictures would stand in one row
        return {name: tensor.to(device) for name, tensor in inputs.items()}
