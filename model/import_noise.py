"""What libraries say while torchao is imported, which `diffusers` does wherever it is installed: lines of no use here.

`--lora_base int8`, `nf4` and `adamw8bit` need torchao and none of what these lines miss: kernels of CUDA on a machine
that has no GPU, quantized checkpoints of `diffusers`, how torchao registers its enums.
"""

import logging
import re

import torch

_NO_KERNELS = re.compile(r"Failed to load \S*torchao/_C\S*: ", re.DOTALL)
_ENUM = re.compile(r"<enum '\w+'> is an Enum subclass and is now natively supported by torch\.compile")
_NO_TENSORS = re.compile(r"Unable to import `torchao` Tensor objects")


def _is_of_use_kernels(record: logging.LogRecord) -> bool:
    return torch.cuda.is_available() or _NO_KERNELS.match(record.getMessage()) is None


def _is_of_use_enum(record: logging.LogRecord) -> bool:
    is_torchaos = getattr(record.args[0], "__module__", "").startswith("torchao.") if record.args else False
    return not (is_torchaos and _ENUM.match(record.getMessage()))


def _is_of_use_tensors(record: logging.LogRecord) -> bool:
    return _NO_TENSORS.match(record.getMessage()) is None


def silence() -> None:
    """Leave out exactly these lines, in this process; before the first import of `diffusers` or torchao."""
    for name, is_of_use in (
        ("torchao", _is_of_use_kernels),
        ("torch.utils._pytree", _is_of_use_enum),
        ("diffusers.quantizers.torchao.torchao_quantizer", _is_of_use_tensors),
    ):
        logging.getLogger(name).addFilter(is_of_use)  # adding it twice adds it once
