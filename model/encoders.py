"""The frozen encoders of a released folder, with a bounded memory of what they have encoded.

One picture and one caption at a time: what a sample is encoded to never depends on its neighbours, and no padding
exists that anything could attend to.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from model.encoder_identity import folder_identity
from model.text_encoder import TextEncoder
from model.vae import ImageVAE

log = logging.getLogger("train")


class TensorCache:
    """The most recently used tensors, up to a number of bytes."""

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[str, tuple[Tensor, ...]] = OrderedDict()

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def get(self, key: str) -> tuple[Tensor, ...] | None:
        """Return the entry and mark it as used, or None."""
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def put(self, key: str, tensors: tuple[Tensor, ...]) -> None:
        """Keep `tensors` under `key`, dropping the entries that were used longest ago."""
        size = _num_bytes(tensors)
        if key in self._entries or size > self.max_bytes:
            return
        self._entries[key] = tensors
        self.num_bytes += size
        while self.num_bytes > self.max_bytes:
            self.num_bytes -= _num_bytes(self._entries.popitem(last=False)[1])


def _num_bytes(tensors: tuple[Tensor, ...]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Encoders:
    """VAE and text encoder of the folder `model`, on `device`, computing in `dtype`.

    with_vision: so that the text encoder sees the pictures of edits.
    load: whether the weights are read now; otherwise `load` or `keep_only` is to be called before anything is encoded.
    """

    vae: ImageVAE | None

    def __init__(
        self,
        model: str | Path,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        latents_cache_gib: float = 1.0,
        text_cache_gib: float = 0.5,
        with_vision: bool = False,
        load: bool = True,
    ):
        self.folder = Path(model)
        self.device, self.dtype, self._with_vision = device, dtype, with_vision
        self.vae, self.text = None, TextEncoder.tokenizer_only(model)
        self._kept_prompts: dict[str, Tensor] = {}
        if load:
            self.load()
        self.latents_cache = TensorCache(int(latents_cache_gib * 2**30))
        self.text_cache = TensorCache(int(text_cache_gib * 2**30))

    def load(self) -> None:
        """Read the weights that are not there.  Raises: ValueError if a folder, a file or a weight is missing."""
        if self.vae is None:
            self.vae = ImageVAE.from_folder(self.folder / "vae", self.device, self.dtype)
        if not self.text.has_weights:
            if not (folder := self.folder / "text_encoder").is_dir():
                raise ValueError(f"no text_encoder/ in {self.folder}; give a folder in the released layout")
            self.text.load_weights(folder, self.device, self.dtype, self._with_vision)

    def keep_only(self, prompts: Sequence[str]) -> None:
        """Do without the text encoder, where all data is encoded: keep the states of some prompts, for samples.

        Without prompts nothing is ever decoded either, and the VAE is not read.
        """
        if prompts:
            self.load()
            self._kept_prompts |= {prompt: self.text.encode(prompt) for prompt in prompts}
            self.text.drop_weights()
        left_out = ("text_encoder",) if prompts else ("text_encoder", "vae")
        size = sum(file.stat().st_size for name in left_out for file in (self.folder / name).glob("*.safetensors"))
        names = " and ".join(left_out)
        log.info("all samples are encoded: %s (%.2f GiB in its files) stays out of memory", names, size / 2**30)

    def needs_picture(self, key: str) -> bool:
        """Return whether `moments` would ask for this picture's pixels.  Safe from any thread."""
        return key not in self.latents_cache

    @cached_property
    def identity(self) -> str:
        """What must have made encoded samples: hashes of the VAE, of the text encoder, of tokenizer and template."""
        vae, text = (folder_identity(self.folder / name) for name in ("vae", "text_encoder"))
        return f"vae {vae}, text encoder {text}, tokenizer and template {self.text.tokenizer_id}"

    @torch.no_grad()
    def moments(
        self, key: str, pixels: Callable[[], Tensor], encoded: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return a picture's normalised posterior mean and standard deviation, each (C, h, w) float32.

        key: names the picture; pixels: gives it as uint8 (3, H, W), called only if the latents are not in memory;
        encoded: the two, if a shard had them.
        """
        if encoded is not None:
            return tuple(moment.to(self.device, torch.float32) for moment in encoded)
        if (entry := self.latents_cache.get(key)) is None:
            entry = self.encode_picture(pixels())
            self.latents_cache.put(key, entry)
        return entry

    @torch.no_grad()
    def encode_picture(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalised posterior of a picture, uint8 (3, H, W): mean and std, each (C, h, w) float32."""
        image = pixels.to(self.device, self.dtype).div(127.5).sub(1)
        return tuple(moment[0].float() for moment in self.vae.encode_moments(image[None]))

    @torch.no_grad()
    def reference_latents(self, key: str | None, pixels: Tensor) -> Tensor:
        """Return a reference's normalised latents (C, h, w) float32: the mode, which edits are trained with.

        key: names the picture at this size, None = do not keep it; pixels: uint8 (3, H, W).
        """
        kept = None if key is None else f"{key}\0reference"  # a target of this name has moments
        if kept is None or (entry := self.latents_cache.get(kept)) is None:
            entry = self.encode_picture(pixels)[:1]
            if kept is not None:
                self.latents_cache.put(kept, entry)
        return entry[0]

    def references(self, key: str, references: Sequence | None) -> list[Tensor]:
        """Return the latents of a sample's references as `reference_latents` does.

        key: names the references at this size; references: `data.edit.ReferencePicture`s, None = text-to-image.
        """
        return [self.reference_latents(f"{key} {i}", shown.vae) for i, shown in enumerate(references or ())]

    @torch.no_grad()
    def prompt(
        self,
        caption: str,
        encoded: Tensor | None = None,
        pictures: Sequence[Tensor] | None = None,
        key: str | None = None,
    ) -> Tensor:
        """Return the text states (T, joint_attention_dim) of a caption, or of an instruction about pictures.

        encoded: those that a shard had.
        pictures: an edit's references as `TextEncoder.encode` takes them, or an empty list; None = text-to-image.
        key: names the pictures at this size; without it the states of pictures are not kept.
        """
        if encoded is not None:
            return encoded.to(self.device, self.dtype)
        if pictures is None and caption in self._kept_prompts:
            return self._kept_prompts[caption]
        kept = caption if pictures is None else f"{key}\0{len(pictures)} pictures\0{caption}"
        if pictures and key is None:
            return self.text.encode(caption, pictures)
        if (entry := self.text_cache.get(kept)) is None:
            entry = (self.text.encode(caption, pictures),)
            self.text_cache.put(kept, entry)
        return entry[0]

    @torch.no_grad()
    def picture(self, latents: Tensor) -> np.ndarray:
        """Decode normalised latents (C, h, w) to a uint8 (H, W, 3) picture."""
        pixels = self.vae.decode(latents[None].to(self.device, self.dtype))[0].float()
        return pixels.add(1).mul(127.5).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).cpu().numpy()
