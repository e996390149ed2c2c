"""The frozen Qwen2.5-VL as text encoder: a caption → the language model's last hidden states.

Legend: T text tokens of one caption.
Source: `diffusers` QwenImagePipeline._get_qwen_prompt_embeds.
"""

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen2_5_VLForConditionalGeneration
from transformers.utils import logging as transformers_logging

from model.templates import MAX_TOKENS, SUFFIX, TEXT_TO_IMAGE_PREFIX

log = logging.getLogger("train")


@contextmanager
def _quiet_transformers() -> Iterator[None]:
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


def _load_language_model(folder: Path, dtype: torch.dtype) -> nn.Module:
    """Load the language part of a `text_encoder/` folder.  Raises: ValueError if a weight is missing."""
    try:
        model, info = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    except OSError as error:
        raise ValueError(f"{folder} cannot be loaded: {error}") from error
    # The library fills what is missing with random numbers.
    if missing := sorted(map(str, {*info["missing_keys"], *info["mismatched_keys"]})):
        raise ValueError(f"{folder} lacks {len(missing)} weights or has them in another shape, first {missing[0]}")
    # The vision tower and the output layer have no part in encoding text.
    return model.model.language_model


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load a `tokenizer/` folder.  Raises: ValueError if its files are missing."""
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} holds no tokenizer that can be loaded: {error}") from error


def _tokenizer_id(folder: Path) -> str:
    """Return a hash of all that token counts depend on: the tokenizer's files and our template."""
    digest = hashlib.sha256(repr((TEXT_TO_IMAGE_PREFIX, SUFFIX, MAX_TOKENS)).encode())
    for file in sorted(path for path in folder.iterdir() if path.is_file()):
        digest.update(repr((file.name, file.read_bytes())).encode())
    return digest.hexdigest()[:16]


class TextEncoder(nn.Module):
    """Encodes one caption at a time, so that no padding exists.

    num_truncated counts the captions that were longer than the model's limit.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, language_model: nn.Module, tokenizer_id: str):
        super().__init__()
        self.tokenizer = tokenizer
        self.language_model = language_model
        self.tokenizer_id = tokenizer_id
        self.num_truncated = 0
        # Counted on the template itself: 34 tokens with the released tokenizer.
        self.num_prefix_tokens = len(self._tokenize(TEXT_TO_IMAGE_PREFIX))

    @classmethod
    def from_folder(
        cls, model_folder: str | Path, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> "TextEncoder":
        """Load `tokenizer/` and `text_encoder/` of a released folder, frozen.

        Raises: ValueError if a folder, a file or a weight is missing.
        """
        folders = Path(model_folder) / "tokenizer", Path(model_folder) / "text_encoder"
        for folder in folders:
            if not folder.is_dir():
                raise ValueError(f"no {folder.name}/ in {model_folder}; give a folder in the released layout")
        with _quiet_transformers():
            tokenizer, language_model = _load_tokenizer(folders[0]), _load_language_model(folders[1], dtype)
        encoder = cls(tokenizer, language_model, _tokenizer_id(folders[0]))
        return encoder.to(device).eval().requires_grad_(False)

    @classmethod
    def tokenizer_only(cls, model_folder: str | Path) -> "TextEncoder":
        """Load `tokenizer/` alone, to count tokens where nothing is encoded.  Raises: ValueError if it is missing."""
        folder = Path(model_folder) / "tokenizer"
        if not folder.is_dir():
            raise ValueError(f"no tokenizer/ in {model_folder}; give a folder in the released layout")
        with _quiet_transformers():
            return cls(_load_tokenizer(folder), nn.Identity(), _tokenizer_id(folder))

    def _tokenize(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _tokens(self, caption: str) -> list[int]:
        """Return the token ids of the filled template, however many."""
        return self._tokenize(TEXT_TO_IMAGE_PREFIX + caption + SUFFIX)

    def count_tokens(self, caption: str) -> int:
        """Return T, the number of states that `encode` returns."""
        return min(len(self._tokens(caption)) - self.num_prefix_tokens, MAX_TOKENS)

    @torch.no_grad()
    def encode(self, caption: str) -> Tensor:
        """Return the caption's states, (T, joint_attention_dim): last hidden states without the template's prefix.

        A caption beyond MAX_TOKENS is cut, and counted.
        """
        tokens, limit = self._tokens(caption), self.num_prefix_tokens + MAX_TOKENS
        if len(tokens) > limit:
            self.num_truncated += 1
            if self.num_truncated.bit_count() == 1:  # the 1st, 2nd, 4th, 8th …: a collection may have millions
                log.warning("caption cut to %d tokens (%d so far): %.60s…", MAX_TOKENS, self.num_truncated, caption)
        ids = torch.tensor([tokens[:limit]], device=next(self.language_model.parameters()).device)
        # The states after the final norm, as the pipeline's hidden_states[-1]; the output layer is never run.
        states = self.language_model(input_ids=ids, use_cache=False).last_hidden_state
        return states[0, self.num_prefix_tokens :]
