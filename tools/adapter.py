"""The adapters of a run trained with --lora_rank: read from a checkpoint, beside their base or built into it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from model.mmdit import MMDiT, MMDiTConfig
from model.mmdit_plan import FSDP_UNITS, without_gradient
from parallel.checkpoint import StoredTensors
from parallel.fingerprint import fingerprint
from parallel.frozen_base import linear_weights, narrowed, widened
from parallel.lora import apply_lora, check_base, is_adapter, released_name
from parallel.safetensors_writer import TensorSpec
from parallel.weights import weight_files
from tools.exported_weights import stored_prefix

_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, eq=False)
class Adapter:
    """Low-rank updates: a layer's weight W becomes W + alpha / rank · up @ down."""

    rank: int
    alpha: float
    targets: tuple[str, ...]  # name patterns of the layers, as training took them
    factors: dict[str, tuple[Tensor, Tensor]]  # layer → down (rank, in) and up (out, rank), float32
    record: dict  # what `parallel.lora.base_record` said of the base

    @classmethod
    def from_run(cls, stored: StoredTensors, kind: str, trained: dict) -> "Adapter":
        """Read one from a checkpoint.  kind: ema or raw; trained: the run's configuration.

        Raises: ValueError if the run trained no adapters.
        """
        rank, prefix = trained.get("lora_rank", 0), stored_prefix(kind, stored)
        layers = [name[len(prefix) : -len(_DOWN)] for name in stored.specs if name.startswith(prefix) and _DOWN in name]
        if not rank or not layers:
            raise ValueError("the run trained no adapters but the network itself (--lora_rank 0); use tools.export")
        factors = {x: (stored.read(prefix + x + _DOWN), stored.read(prefix + x + _UP)) for x in sorted(layers)}
        alpha, record = trained["lora_alpha"] or rank, {"base": stored.state["base"]}
        return cls(rank, float(alpha), tuple(trained["lora_targets"]), factors, record)

    def update(self, layer: str) -> Tensor:
        """Return what is added to a layer's weight, (out, in) float32."""
        down, up = self.factors[layer]
        return self.alpha / self.rank * (up @ down)


class MergedWeights:
    """The tensors of the released network with an adapter built in; they are read from the base's files one by one.

    specs: name → shape and dtype, in the order of the network.
    """

    def __init__(self, adapter: Adapter, base: Path, config: MMDiTConfig, dtype: torch.dtype):
        """base: a transformer/ folder.  Raises: ValueError if it is not the base that the adapter was trained on."""
        with torch.device("meta"):
            network = MMDiT(config)
        self._adapter, self._base, wanted = adapter, open_base(adapter, base, network), network.state_dict()
        self.specs = {name: TensorSpec(tuple(tensor.shape), dtype) for name, tensor in wanted.items()}

    @property
    def num_bytes(self) -> int:
        """Of all values together."""
        return sum(spec.num_bytes for spec in self.specs.values())

    def read(self, name: str) -> Tensor:
        """Return one tensor as the export holds it; the sum is made in float32 and rounded once."""
        tensor, layer = self._base.read(name), name.removesuffix(".weight")
        if layer in self._adapter.factors and name.endswith(".weight"):
            tensor = tensor.float() + self._adapter.update(layer)
        return tensor.to(self.specs[name].dtype)


class BaseWeights:
    """The tensors of a transformer/ folder as a run computed with them, read one at a time.

    dtype: in which the run loaded them.  kept_as: the format of `parallel.frozen_base` in which it kept those of the
    names in `narrow`; None = all as they were loaded.
    """

    def __init__(
        self, folder: Path, dtype: torch.dtype, kept_as: str | None = None, narrow: frozenset[str] = frozenset()
    ):
        self.files, self._dtype, self._kept_as, self._narrow = weight_files(folder), dtype, kept_as, narrow

    def read(self, name: str) -> Tensor:
        """Return one tensor; of one that was kept in fewer bits what is left of it."""
        loaded = self._loaded(name)
        if self._kept_as is None or name not in self._narrow:
            return loaded
        return widened(narrowed(loaded, self._kept_as), self._dtype)

    def loaded_items(self) -> Iterator[tuple[str, Tensor]]:
        """Give all, one after another, as they were before any was kept in fewer bits."""
        return ((name, self._loaded(name)) for name in self.files)

    def _loaded(self, name: str) -> Tensor:
        with safe_open(self.files[name], framework="pt") as opened:
            return opened.get_tensor(name).to(self._dtype)


def open_base(adapter: Adapter, folder: Path, network: MMDiT) -> BaseWeights:
    """Open the base of an adapter.  network: without adapters.  Raises: ValueError if the folder holds another one."""
    record = adapter.record["base"]
    base = BaseWeights(
        folder, getattr(torch, record["dtype"]), record.get("kept_as"), linear_weights(network, FSDP_UNITS)
    )
    check_base(adapter.record, {"base": record | {"fingerprint": fingerprint(base.loaded_items())}}, str(folder))
    return base


def load_adapted(network: MMDiT, adapter: Adapter, folder: Path) -> None:
    """Give a network on the meta device the base's weights and, beside them, the adapter.

    folder: the base's transformer/.  Raises: ValueError if it is not the base that the adapter was trained on.
    """
    base, skip = open_base(adapter, folder, network), without_gradient(network)
    apply_lora(network, adapter.targets, adapter.rank, adapter.alpha, skip=skip)
    state = {}
    for name, _ in network.named_parameters():
        known = released_name(name)
        layer, down, _ = known.partition(_DOWN)
        if is_adapter(known):
            state[name] = adapter.factors[layer][0] if down else adapter.factors[known.removesuffix(_UP)][1]
        else:
            state[name] = base.read(known)
    network.load_state_dict(state, strict=True, assign=True)
