"""The frozen Qwen2.5-VL as text encoder: a caption → the language model's last hidden states.

Legend: T text tokens of one caption.
Source: `diffusers` QwenImagePipeline._get_qwen_prompt_embeds.
"""

import hashlib
import logging
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen2_5_VLForConditionalGeneration
from transformers.utils import logging as transformers_logging

from model.templates import MAX_TOKENS, SUFFIX, TEXT_TO_IMAGE_PREFIX

log = logging.getLogger("train")


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

        Raises: ValueError if a folder is missing.
        """
        folders = Path(model_folder) / "tokenizer", Path(model_folder) / "text_encoder"
        for folder in folders:
            if not folder.is_dir():
                raise ValueError(f"no {folder.name}/ in {model_folder}; give a folder in the released layout")
        digest = hashlib.sha256()
        for file in sorted(folders[0].iterdir()):
            digest.update(file.name.encode() + file.read_bytes())
        verbosity = transformers_logging.get_verbosity()
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        try:
            tokenizer = AutoTokenizer.from_pretrained(folders[0])
            full = Qwen2_5_VLForConditionalGeneration.from_pretrained(folders[1], dtype=dtype)
        finally:
            transformers_logging.set_verbosity(verbosity)
        # The vision tower and the output layer have no part in encoding text.
        language_model = full.model.language_model.to(device).eval().requires_grad_(False)
        return cls(tokenizer, language_model, digest.hexdigest()[:16])

    def _tokenize(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _tokens(self, caption: str) -> list[int]:
        """Return the token ids of the filled template, at most MAX_TOKENS after the prefix."""
        tokens = self._tokenize(TEXT_TO_IMAGE_PREFIX + caption + SUFFIX)
        return tokens[: self.num_prefix_tokens + MAX_TOKENS]

    def count_tokens(self, caption: str) -> int:
        """Return T, the number of states that `encode` returns."""
        return len(self._tokens(caption)) - self.num_prefix_tokens

    @torch.no_grad()
    def encode(self, caption: str) -> Tensor:
        """Return the caption's states, (T, joint_attention_dim): last hidden states without the template's prefix.

        A caption beyond MAX_TOKENS is cut, and counted.
        """
        tokens = self._tokens(caption)
        if len(tokens) == self.num_prefix_tokens + MAX_TOKENS:
            self.num_truncated += 1
            log.warning("caption cut to %d tokens (%d so far): %.60s…", MAX_TOKENS, self.num_truncated, caption)
        device = next(self.language_model.parameters()).device
        ids = torch.tensor([tokens], device=device)
        states = self.language_model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        return states.last_hidden_state[0, self.num_prefix_tokens :]
