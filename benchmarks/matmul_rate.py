"""How near an MMDiT step comes to this machine's own matrix products: `./launch.sh -m benchmarks.matmul_rate`.

Float32 on a CPU, one process, all cores.  The step (forward and backward of an MMDiT of width 1024 over a pack of
pictures) and the bare products of the same shapes are timed in turn in the same run; the rate of a step counts its
matrix products only (`utils.flops`), so the ratio is the share of the machine that the network uses.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from model.layout import PackedLayout
from model.mmdit import MMDiT, MMDiTConfig
from utils.config import parse, run_main
from utils.flops import mmdit_forward_flops


@dataclass(frozen=True)
class Config:
    width: int = 1024
    num_layers: int = 2
    num_samples: int = 4
    side: int = 16  # tokens a side of each picture: 16 = 256 pixels
    txt_len: int = 64
    repeats: int = 7


def seconds(function: Callable[[], None]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def main(cfg: Config) -> None:
    torch.manual_seed(0)
    config = MMDiTConfig(num_layers=cfg.num_layers, num_attention_heads=cfg.width // 128, joint_attention_dim=cfg.width)
    model = MMDiT(config)
    layout = PackedLayout.build([[(1, cfg.side, cfg.side)]] * cfg.num_samples, [cfg.txt_len] * cfg.num_samples)
    num_img, num_txt = len(layout.img_sample), len(layout.txt_sample)
    img, txt = torch.randn(num_img, 64), torch.randn(num_txt, cfg.width)
    t = torch.rand(cfg.num_samples)

    def step() -> None:
        model(img, txt, t, layout).square().mean().backward()
        model.zero_grad()

    # The products of one linear layer and its backward, at the image stream's size.
    x, w = torch.randn(num_img, cfg.width), torch.randn(cfg.width, 4 * cfg.width)
    y = torch.randn(num_img, 4 * cfg.width)

    def products() -> None:
        x @ w
        y @ w.T
        x.T @ y

    step_flops = 3 * mmdit_forward_flops(config, layout.img_lens, layout.txt_lens)
    product_flops = 3 * 2 * num_img * cfg.width * 4 * cfg.width
    step(), products()  # warm up
    steps, bare = [], []
    for _ in range(cfg.repeats):
        bare.append(seconds(lambda: [products() for _ in range(10)]) / 10)
        steps.append(seconds(step))
    step_rate, product_rate = step_flops / statistics.median(steps), product_flops / statistics.median(bare)
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    tokens, cores = f"{num_img} + {num_txt} tokens", torch.get_num_threads()
    print(f"width {cfg.width}, {parameters:.0f} M parameters, {tokens}, {cores} cores")
    print(f"matrix products  {product_rate / 1e9:8.0f} GFLOP/s")
    print(f"MMDiT step       {step_rate / 1e9:8.0f} GFLOP/s   {step_rate / product_rate:.1%} of it")


if __name__ == "__main__":
    run_main(main, parse(Config, __doc__))
