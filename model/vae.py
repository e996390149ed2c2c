"""The Qwen-Image VAE around single pictures: pixels ↔ normalised latents.

Legend: B samples, H W pixels, h w latent rows and columns (8 pixels each), C = 16 latent channels.
"""

from pathlib import Path

import torch
from diffusers import AutoencoderKLQwenImage
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d, QwenImageRMS_norm
from torch import Tensor, nn


class _ImageConv2d(nn.Conv2d):
    """A causal 3-D convolution as a single frame sees it: its last temporal tap as a 2-D convolution.

    The other taps meet only the zero padding before the first frame, so the result is the same for one frame and
    costs a third of the arithmetic.
    """

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[2] == 1, "single frames only"
        return super().forward(x.squeeze(2)).unsqueeze(2)


class _RMSNorm(QwenImageRMS_norm):
    """The library's norm over channels with the length as a sum of squares.

    On a CPU `torch.linalg.vector_norm` over any axis but the last takes nine times as long, a third of all encoding.
    """

    def forward(self, x: Tensor) -> Tensor:
        values = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        length = values.square().sum(dim=1 if self.channel_first else -1, keepdim=True).sqrt().clamp(min=1e-12)
        return (values / length).to(x.dtype) * self.scale * self.gamma + self.bias


def use_image_convolutions(vae: AutoencoderKLQwenImage) -> None:
    """Replace, in place, every causal 3-D convolution by its exact equivalent for single frames, and make norms faster.

    Afterwards the state dict no longer has the released shapes, and only `ImageVAE` can call the module.
    """
    for module in list(vae.modules()):
        if type(module) is QwenImageRMS_norm:
            module.__class__ = _RMSNorm
        for name, conv in list(module.named_children()):
            if not isinstance(conv, QwenImageCausalConv3d):
                continue
            padding = (conv._padding[2], conv._padding[0])  # rows, columns
            image_conv = _ImageConv2d(
                conv.in_channels, conv.out_channels, conv.kernel_size[1:], conv.stride[1:], padding, device="meta"
            )
            image_conv.weight = nn.Parameter(conv.weight.detach()[:, :, -1].clone(), conv.weight.requires_grad)
            image_conv.bias = nn.Parameter(conv.bias.detach(), conv.bias.requires_grad)
            setattr(module, name, image_conv)


class ImageVAE(nn.Module):
    """`AutoencoderKLQwenImage` for single pictures, with latents normalised to zero mean and unit variance."""

    def __init__(self, vae: AutoencoderKLQwenImage):
        super().__init__()
        use_image_convolutions(vae)
        self.vae = vae
        self.scale_factor = 2 ** len(vae.temperal_downsample)  # pixels a latent row
        self.num_channels = vae.config.z_dim

    @classmethod
    def from_folder(cls, folder: str | Path, device: torch.device, dtype: torch.dtype = torch.float32) -> "ImageVAE":
        """Load a released `vae/` folder, frozen.  Raises: ValueError if it is not there."""
        if not (Path(folder) / "config.json").is_file():
            raise ValueError(f"no VAE at {folder}; give --model a folder in the released layout")
        vae = AutoencoderKLQwenImage.from_pretrained(
            str(folder), torch_dtype=dtype, low_cpu_mem_usage=False, local_files_only=True
        )
        return cls(vae).to(device).eval().requires_grad_(False)

    def _statistic(self, name: str, like: Tensor) -> Tensor:
        values = getattr(self.vae.config, name)
        return torch.tensor(values, dtype=like.dtype, device=like.device).view(1, -1, 1, 1)

    def encode_moments(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Encode pictures to the posterior's normalised mean and standard deviation.

        pixels: (B, 3, H, W) in [-1, 1], H and W multiples of 8.
        Returns two (B, C, h, w) tensors; the first is the mode.
        Source: `QwenImageEditPipeline._encode_vae_image`: `(z - latents_mean) / latents_std`.
        """
        # Called without a frame cache the coder skips its temporal layers, exactly as for a first frame.
        moments = self.vae.quant_conv(self.vae.encoder(pixels.unsqueeze(2))).squeeze(2)
        mean, logvar = moments.chunk(2, dim=1)
        std = torch.exp(0.5 * logvar.clamp(-30.0, 20.0))
        scale = self._statistic("latents_std", mean)
        return (mean - self._statistic("latents_mean", mean)) / scale, std / scale

    def decode(self, latents: Tensor) -> Tensor:
        """Decode normalised latents (B, C, h, w) to pixels (B, 3, H, W) in [-1, 1]."""
        latents = latents * self._statistic("latents_std", latents) + self._statistic("latents_mean", latents)
        pixels = self.vae.decoder(self.vae.post_quant_conv(latents.unsqueeze(2))).squeeze(2)
        return pixels.clamp(-1.0, 1.0)
