"""What is printed while torchao is imported on a machine without a GPU: none of its lines, and all of others."""

import enum
import logging
import os
import subprocess
import sys

import torch

import model  # noqa: F401  (sets the filters)
from tests.script_runs import REPOSITORY

LOGGERS = ("torchao", "torch.utils._pytree", "diffusers.quantizers.torchao.torchao_quantizer")
QUANTIZE = """
from model.vae import AutoencoderKLQwenImage
from parallel.frozen_base import narrowed, widened
import torch
weight = torch.randn(64, 64)
for kept_as in ("int8", "nf4"):
    assert (widened(narrowed(weight, kept_as), torch.float32) - weight).abs().mean() < 0.2
"""


def test_a_base_in_few_bits_prints_nothing():
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    printed = subprocess.run(
        [sys.executable, "-c", QUANTIZE], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=240
    )
    assert (printed.returncode, printed.stdout, printed.stderr) == (0, "", "")


def test_other_lines_of_the_same_loggers_are_heard(monkeypatch):
    class Ours(enum.Enum):
        A = 1

    heard = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    is_natively_supported = "%s is an Enum subclass and is now natively supported by torch.compile as an opaque value."
    said = [
        ("torchao", "Failed to load %s/torchao/other.so: no", "/site"), ("torchao", "Skipping import: %s", "old torch"),
        ("torch.utils._pytree", is_natively_supported, Ours), ("torch.utils._pytree", "%s is registered twice", Ours),
        ("diffusers.quantizers.torchao.torchao_quantizer", "Unable to import %s", "x"),
    ]  # fmt: skip
    for name in LOGGERS:
        logging.getLogger(name).addHandler(handler)
    try:
        for name, message, argument in said:
            logging.getLogger(name).warning(message, argument)
        assert heard == [message % (argument,) for _, message, argument in said]
        heard.clear()
        kernels = "Failed to load /site/torchao/_C_mxfp8.cpython-310-x86_64-linux-gnu.so: Could not load this library"
        logging.getLogger("torchao").warning(kernels)
        assert heard == []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        logging.getLogger("torchao").warning(kernels)
        assert heard == [kernels]  # a GPU could use them
    finally:
        for name in LOGGERS:
            logging.getLogger(name).removeHandler(handler)
