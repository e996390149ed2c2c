"""The weights of an export: read from a checkpoint one tensor at a time, with the names and dtype that it needs."""

from typing import ClassVar

import torch
from torch import Tensor

from data.captions import LANGUAGE_ROWS
from model.mmdit import MMDiT, MMDiTConfig
from parallel.checkpoint import StoredTensors
from parallel.safetensors_writer import TensorSpec

_EDIT_RAW = "renderer."  # what train_edit_ddp.py calls the network
PREFIXES = {"ema": "ema.", "raw": "model."}  # of the tensors' names in a checkpoint
_LANGUAGE_EMBED = "language_embed.weight"
_TIME_BIAS = "time_text_embed.timestep_embedder.linear_2.bias"  # the language embedding is added right after it


def stored_prefix(kind: str, stored: StoredTensors) -> str:
    """Return how the names of a checkpoint's network begin.  kind: ema or raw."""
    is_edit_raw = kind == "raw" and any(name.startswith(_EDIT_RAW) for name in stored.specs)
    return _EDIT_RAW if is_edit_raw else PREFIXES[kind]


class NoWeights:
    """Of a run that did not train the network."""

    specs: ClassVar[dict[str, TensorSpec]] = {}
    num_bytes = 0


class ExportedWeights:
    """The tensors of the released network.

    specs: name → shape and dtype, in the order of the network.
    """

    def __init__(self, stored: StoredTensors, kind: str, config: MMDiTConfig, dtype: torch.dtype, language: str = ""):
        """kind: ema or raw.  config: of the network.  language: see `_language_row`; empty for none.

        Raises: ValueError if the checkpoint is of another network, or holds what the released network lacks.
        """
        self._stored, self._prefix = stored, stored_prefix(kind, stored)
        found = {
            name.removeprefix(self._prefix): tuple(shape)
            for name, (shape, _) in stored.specs.items()
            if name.startswith(self._prefix)
        }
        if not found:
            raise ValueError(f"the checkpoint holds no {kind} weights; give --weights the other of {list(PREFIXES)}")
        with torch.device("meta"):
            wanted = {name: tuple(tensor.shape) for name, tensor in MMDiT(config).state_dict().items()}
        self._language_bias = self._language_row(language, found.pop(_LANGUAGE_EMBED, None) is not None)
        if found != wanted:
            different = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
            first = different[0]
            raise ValueError(
                f"the checkpoint is not of the network in the model folder's transformer/config.json: {len(different)} "
                f"tensors differ, first {first}: {found.get(first)} in the checkpoint, {wanted.get(first)} in the "
                "network; give --model the folder that the run was trained with"
            )
        self.specs = {name: TensorSpec(shape, dtype) for name, shape in wanted.items()}

    @property
    def num_bytes(self) -> int:
        """Of all values together."""
        return sum(spec.num_bytes for spec in self.specs.values())

    def read(self, name: str) -> Tensor:
        """Return one tensor as the export holds it.  At its peak this takes the checkpoint's tensor twice."""
        tensor = self._stored.read(self._prefix + name)
        if name == _TIME_BIAS and self._language_bias is not None:
            tensor += self._language_bias
        return tensor.to(self.specs[name].dtype)

    def _language_row(self, language: str, is_trained: bool) -> Tensor | None:
        """Return the embedding of a language, (D,), or None if it changes nothing.

        No other program has a language embedding.  The network adds a sample's row to its time embedding, so that the
        time embedding's bias plus the row is the same network for prompts in that one language.
        """
        if not is_trained:
            if language:
                raise ValueError(f"--language {language}: the run has no language embedding; leave the flag out")
            return None
        rows = self._stored.read(self._prefix + _LANGUAGE_EMBED)
        if language:
            return rows[LANGUAGE_ROWS.index(language)]
        if rows.any():
            raise ValueError(
                "the run trained a language embedding, which no other program knows; name with --language "
                f"({', '.join(LANGUAGE_ROWS)}) the one to build into the weights, which is exact for prompts in it"
            )
        return None
