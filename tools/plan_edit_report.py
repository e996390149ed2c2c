"""What a plan of train_edit_ddp.py's step says, for the terminal and as JSON."""

from dataclasses import asdict, dataclass

from tools.plan_edit import EditPlan
from tools.plan_report import GIB, KINDS, Surroundings


@dataclass(frozen=True)
class EditReport:
    """One planned step on one device."""

    plan: EditPlan
    around: Surroundings

    @property
    def fits(self) -> bool:
        """Whether the peak leaves the reserve free."""
        return self.plan.peak()[1].total() <= self.around.limit_bytes

    def bars(self) -> dict[str, float]:
        """Return GiB by printed kind at the step's peak, encoders included."""
        kinds = self.plan.peak()[1].by_kind()
        named = {name: kinds.get(kind, 0) / GIB for kind, name in KINDS.items() if kind != "unsharded"}
        return named | {"encoders": self.around.encoders_bytes / GIB}

    def to_json(self) -> dict:
        """Return everything, JSON-able."""
        where, breakdown = self.plan.peak()
        settings = self.plan.settings
        sizes = {"encoders": self.around.encoders_bytes, "reserve": self.around.reserve_bytes}
        peak = {"bytes": breakdown.total(), "fits": self.fits, "where": where, "by_kind": breakdown.by_kind()}
        chosen = {name: value for name, value in vars(settings).items() if name not in ("renderer", "vlm", "dtype")}
        return {
            "settings": chosen | {"dtype": str(settings.dtype).removeprefix("torch.")},
            "device": asdict(self.around.device),
            "bytes": self.plan.num_bytes | sizes,
            "activations": self.plan.kept(),
            "peak": peak,
        }


def print_edit_plan(report: EditReport) -> None:
    """Print memory by kind, where the peak is, and whether it fits."""
    settings, (where, breakdown) = report.plan.settings, report.plan.peak()
    device, bars = report.around.device, report.bars()
    what = settings.train + (f", LoRA {settings.lora_rank} on {settings.lora_base}" if settings.lora_rank else "")
    what += ", vision tower frozen" * settings.freeze_vision + ", ZeRO-1" * settings.zero
    print(f"{settings.num_ranks} × {device.name}, {device.memory_gib} GiB of which "
          f"{report.around.reserve_bytes / GIB:.1f} stay free: {what}; {settings.optimizer}, recompute "
          f"{settings.activation_checkpointing}")  # fmt: skip
    print(f"a micro-batch of {len(settings.grids)} edits, {settings.num_image_tokens} image + "
          f"{sum(settings.text_lens)} text tokens, plans of {settings.num_answer} tokens")  # fmt: skip
    print("".join(f"{name[:11]:>12}" for name in (*bars, "peak")))
    print("".join(f"{value:>12.2f}" for value in (*bars.values(), sum(bars.values()))))
    print(f"GiB on a GPU at the peak: {where}")
    for network, kept in report.plan.kept().items():
        print(f"activations alive as the {network}'s backward begins: {kept / GIB:.2f} GiB")
    left = (report.around.limit_bytes - breakdown.total()) / GIB
    print(f"fits, {left:.1f} GiB stay free" if report.fits else f"OVER by {-left:.1f} GiB: it would run out of memory")
