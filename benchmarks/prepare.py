"""How fast tools.prepare makes shards: `./launch.sh -m benchmarks.prepare`.

Draws a folder of photograph-like JPEG files with captions, prepares it in one process, and prints pictures by second of
processor time, which other jobs on the machine hardly change, and by second of the clock.
"""

import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from tools import prepare
from utils.config import parse, run_main


@dataclass(frozen=True)
class Config:
    num_pictures: int = 200
    width: int = 1536  # pixels
    height: int = 1024
    areas: tuple[int, ...] = (640,)  # as of tools.prepare
    num_workers: int = 0  # threads; 0 = the work is done in the main one
    encode: str = ""  # a model folder: with its encoders, assets/tiny for example


def draw_folder(folder: Path, cfg: Config) -> int:
    """Write pictures, each with structure at all scales, and captions; return the pictures' bytes."""
    folder.mkdir()
    total = 0
    for i in range(cfg.num_pictures):
        rng = np.random.default_rng(i)
        pixels = np.zeros((cfg.height, cfg.width, 3), np.float32)
        for cells, height in ((6, 90), (40, 25), (300, 8)):
            noise = rng.integers(0, 256, (cells, cells, 3), dtype=np.uint8)
            layer = Image.fromarray(noise).resize((cfg.width, cfg.height), Image.Resampling.BICUBIC)
            pixels += (np.asarray(layer, np.float32) - 128) * (height / 90)
        path = folder / f"{i:05d}.jpg"
        Image.fromarray(np.clip(pixels + 128, 0, 255).astype(np.uint8)).save(path, quality=92)
        total += path.stat().st_size
        path.with_suffix(".json").write_text(json.dumps({"captions": {"en": f"picture {i}", "zh": f"图片{i}"}}))
    return total


def main(cfg: Config) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder) / "in", Path(folder) / "out"
        num_bytes = draw_folder(source, cfg)
        settings = prepare.Config(
            (str(source),),
            str(output),
            areas=cfg.areas,
            num_workers=cfg.num_workers,
            encode=cfg.encode,
            cache_folder=str(Path(folder) / "cache"),
        )
        clock, processor = time.monotonic(), time.process_time()
        prepare.main(settings)
        clock, processor = time.monotonic() - clock, time.process_time() - processor
        written = sum(path.stat().st_size for path in output.glob("*.tar"))
    each = num_bytes / cfg.num_pictures / 2**20
    print(f"{cfg.num_pictures} pictures of {cfg.width} x {cfg.height}, {each:.2f} MiB each, areas {cfg.areas}")
    print(f"  {cfg.num_pictures / processor:8.1f} pictures/s a core   ({processor:.1f} s of processor time)")
    print(f"  {cfg.num_pictures / clock:8.1f} pictures/s by the clock")
    print(f"  {num_bytes / processor / 1e6:8.1f} MB/s read, {written / processor / 1e6:.1f} MB/s written, a core")


if __name__ == "__main__":
    run_main(main, parse(Config, __doc__))
