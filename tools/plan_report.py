"""What a plan says, as a table for the terminal and as JSON."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from parallel.step_trace import Work
from tools.plan_depth import PlannedStep
from tools.plan_step import StepSettings
from tools.plan_time import EXPECTED, ROOFLINE, StepTime, group_axes, operator_seconds, step_time
from utils.devices import Device

GIB = 2**30
# Bars and columns, in this order: kind in the trace → its name in print.
KINDS = {
    "parameters": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "EMA": "EMA",
    "unsharded": "gathered",
    "activations": "activations",
    "backward": "backward",
    "batch": "batch",
    "other": "other",
}


@dataclass(frozen=True)
class Surroundings:
    """What the step shares its device with, and where it runs."""

    device: Device
    gpus_per_node: int
    encoders_bytes: int
    reserve_bytes: int

    @property
    def limit_bytes(self) -> int:
        """What is left for the step."""
        return self.device.memory_bytes - self.encoders_bytes - self.reserve_bytes


class Report:
    """One planned step on one device."""

    def __init__(self, step: PlannedStep, around: Surroundings):
        self.step, self.around, self.settings = step, around, step.settings
        self.position, self.breakdown = step.peak()
        self.roofline, self.expected = (
            step_time(step, around.device, shares, around.gpus_per_node) for shares in (ROOFLINE, EXPECTED)
        )

    @property
    def peak_bytes(self) -> int:
        return self.breakdown.total()

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.around.limit_bytes

    @property
    def samples_per_s(self) -> float:
        """Of the whole job, with overlap, at the expected rates."""
        data_ranks = self.settings.dp_replicate * self.settings.dp_shard
        return data_ranks * len(self.settings.txt_lens) * self.settings.accumulate / self.expected.overlapped

    def bars(self) -> dict[str, float]:
        """Return GiB by printed kind at the step's peak, encoders included."""
        kinds = self.breakdown.by_kind()
        return {name: kinds.get(kind, 0) / GIB for kind, name in KINDS.items()} | {
            "encoders": self.around.encoders_bytes / GIB
        }

    def collectives(self) -> list[dict]:
        """Return every kind of collective of a step, most bytes first."""
        rows: Counter = Counter()
        for c, count in self.step.totals("collectives").items():
            axes = "×".join(group_axes(c.ranks, self.settings)) or "none"
            across = len({rank // self.around.gpus_per_node for rank in c.ranks}) > 1
            rows[c.kind, axes, len(c.ranks), across, c.num_bytes] += count
        keys = ("kind", "axes", "ranks", "across_nodes", "bytes_each", "count")
        listed = [dict(zip(keys, (*row, count), strict=True)) for row, count in rows.items()]
        return sorted(listed, key=lambda row: -row["bytes_each"] * row["count"])

    def parts(self) -> list[dict]:
        """Return arithmetic and roofline time by part of the network, the longest first."""
        rows: dict[str, dict] = {}
        for work, count in self.step.totals("work").items():
            row = rows.setdefault(part_name(work), {"flops": 0, "recomputed_flops": 0, "bytes": 0, "roofline_s": 0.0})
            row["recomputed_flops" if work.recomputed else "flops"] += count * work.flops
            row["bytes"] += count * work.traffic
            row["roofline_s"] += count * operator_seconds(work, self.around.device, ROOFLINE)
        listed = [{"part": name} | row for name, row in rows.items()]
        return sorted(listed, key=lambda row: -row["roofline_s"])

    def modules(self) -> list[tuple[str, str, int]]:
        """Return (module, kind, bytes) at the peak for what the step itself makes, most bytes first."""
        made = [(label, kind, n) for (kind, label), n in self.breakdown.items() if label and n > 0]
        return sorted(made, key=lambda row: -row[2])

    def to_json(self) -> dict:
        """Return everything, JSON-able."""
        return {
            "settings": settings_json(self.settings),
            "device": asdict(self.around.device),
            "gpus": self.settings.num_ranks,
            "gpus_per_node": self.around.gpus_per_node,
            "bytes": self.step.num_bytes
            | {"encoders": self.around.encoders_bytes, "reserve": self.around.reserve_bytes},
            "peak": {
                "bytes": self.peak_bytes,
                "fits": self.fits,
                "where": self.position._asdict(),
                "by_kind": self.breakdown.by_kind(),
                "by_module": [{"module": m, "kind": k, "bytes": n} for m, k, n in self.modules()],
            },
            "collectives": self.collectives(),
            "parts": self.parts(),
            "time": {"roofline": time_json(self.roofline), "expected": time_json(self.expected)},
            "samples_per_s": self.samples_per_s,
        }


def part_name(work: Work) -> str:
    """Return the part of the network an operator belongs to: attention products, attn, img_mlp, img_in …"""
    if work.flops and ("attn" in work.operator or "attention" in work.operator):
        return "attention products"
    in_block = work.module.split(".*")[-1].strip(".")
    if not work.module:
        return "loss, optimizer, FSDP"
    return in_block.split(".")[0] or "block (norms, residuals)"


def settings_json(settings: StepSettings) -> dict:
    """Return the settings with dtypes by name."""
    return {name: str(v).removeprefix("torch.") if "dtype" in name else v for name, v in asdict(settings).items()}


def time_json(time: StepTime) -> dict:
    return asdict(time) | {"serial": time.serial, "mfu": time.mfu, "serial_mfu": time.serial_mfu}


def mesh_name(settings: StepSettings) -> str:
    """Return the mesh as its sizes: dp_replicate × dp_shard × cp × tp."""
    return " × ".join(str(getattr(settings, axis)) for axis in ("dp_replicate", "dp_shard", "cp", "tp"))


def print_table(reports: Sequence[Report]) -> None:
    """Print a line a plan: memory by kind, whether it fits, and the expected step."""
    names = [*KINDS.values(), "encoders"]
    head = "".join(f"{name[:9]:>10}" for name in names)
    print(f"{'rep × shard × cp × tp':<22}{'recompute':<11}{'reshard':<8}{head}{'peak':>8}", end="")
    print(f"{'':>5}{'step s':>8}{'MFU':>7}{'serial':>8}{'samples/s':>11}{'bound':>8}")
    for report in reports:
        bars, settings, expected = report.bars(), report.settings, report.expected
        reshard = "yes" if settings.reshard_after_forward else "no"
        print(f"{mesh_name(settings):<22}{settings.activation_checkpointing:<11}{reshard:<8}", end="")
        print("".join(f"{bars[name]:>10.2f}" for name in names), end="")
        print(f"{sum(bars.values()):>8.1f}{'' if report.fits else ' OVER':>5}{expected.overlapped:>8.2f}", end="")
        print(f"{expected.mfu:>7.1%}{expected.serial_mfu:>8.1%}{report.samples_per_s:>11.2f}", end="")
        print(f"{report.roofline.mfu:>8.1%}")
    print("GiB a rank at its peak; step, MFU (with overlap, serial) and samples/s as expected; bound: MFU at the roof")


def print_details(report: Report) -> None:
    """Print one plan's peak by module, collectives and arithmetic."""
    p = report.position
    print(f"\npeak at micro-batch {p.micro_batch}, {p.phase}, block {p.stage}; made by the step itself, GiB:")
    for module, kind, num_bytes in report.modules()[:12]:
        print(f"  {num_bytes / GIB:8.3f}  {kind:<12}{module}")
    print("\ncollectives of a step    axes               ranks  across nodes   MiB each    count   GiB in all")
    for c in report.collectives()[:14]:
        in_all = c["bytes_each"] * c["count"] / GIB
        print(f"  {c['kind']:<22} {c['axes']:<18} {c['ranks']:>5}  {'yes' if c['across_nodes'] else 'no':<12}", end="")
        print(f"{c['bytes_each'] / 2**20:>11.3f}{c['count']:>9}{in_all:>13.2f}")
    print("\npart                       TFLOP  recomputed  memory traffic GiB  roofline ms")
    for row in report.parts():
        print(f"  {row['part']:<24}{row['flops'] / 1e12:>6.1f}{row['recomputed_flops'] / 1e12:>12.1f}"
              f"{row['bytes'] / GIB:>20.1f}{row['roofline_s'] * 1e3:>13.1f}")  # fmt: skip
    for name, t in (("at the roof", report.roofline), ("expected", report.expected)):
        print(f"\n{name}: arithmetic {t.compute:.3f} s + collectives waited for {t.waited_for:.3f} s + FSDP's "
              f"{t.overlappable:.3f} s = {t.serial:.3f} s ({t.serial_mfu:.1%}); with overlap {t.overlapped:.3f} s "
              f"({t.mfu:.1%})")  # fmt: skip
