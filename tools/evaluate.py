"""Ask a trained run to draw what it was trained on, and look up what it drew: `python -m tools.evaluate --run RUN`.

A number of training samples are prompted by their first caption in every language.  Each generated picture is compared
with every training picture of its size.  Top-k: the share whose own sample is among the k nearest, by Euclidean
distance of pixels or of VAE latents.  Writes evaluation.json and evaluation.png to the run folder.
"""

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from data.captions import LANGUAGE_ROWS, language_of, language_row
from data.index import build_index
from data.mixture import load_mixture
from data.reader import Reader
from tools.sample import draw_pictures, load_model, sampler_settings
from utils.config import parse, run_main
from utils.picture_grid import labelled_grid
from utils.random_streams import stream_seed, torch_generator


@dataclass(frozen=True)
class Config:
    run: str = "runs/mmdit"  # a run folder
    step: int = -1  # which checkpoint; -1 = the newest valid one
    weights: str = "ema"  # ema or raw
    num_names: int = 32  # training samples to draw, each in every language it has
    height: int = 64  # pixels; samples of this size take part
    width: int = 64
    num_steps: int = 30  # sampler steps
    cfg_scale: float = 2.0
    seed: int = 0


def ranks_of_truth(drawn: Tensor, candidates: Tensor, truth: Tensor) -> Tensor:
    """Return for each drawn vector how many candidates lie nearer than its true one.

    drawn: (P, F), candidates: (K, F), truth: (P,) index into the candidates.  Returns (P,) int64, 0 = nearest.
    """
    distances = torch.cdist(drawn, candidates)
    return (distances < distances.gather(1, truth[:, None])).sum(dim=1)


def main(cfg: Config) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network, encoders, source = load_model(cfg.run, "", cfg.step, cfg.weights, device, torch.float32)
    trained = json.loads((Path(cfg.run) / "config.json").read_text())
    cache = Path(trained["cache_folder"])
    shards = list(load_mixture(trained["data"]).shards("train", cache))
    index = build_index(shards, encoders.text.count_tokens, encoders.text.tokenizer_id, cache)
    reader = Reader(index)

    same_size = [i for i in range(len(index)) if (index[i].height, index[i].width) == (cfg.height, cfg.width)]
    if not same_size:
        raise ValueError(f"no training sample is {cfg.height} x {cfg.width} pixels; set --height and --width")
    candidates = [reader.read_pixels(i) for i in same_size]  # uint8 (3, H, W)
    chosen = sorted(same_size, key=lambda i: stream_seed(cfg.seed, 0, index[i].key, "evaluate"))[: cfg.num_names]
    prompts, truth = [], []
    for i in chosen:
        for captions in reader.read_captions(i).values():
            prompts.append(captions[0])
            truth.append(same_size.index(i))

    shape = (encoders.vae.num_channels, cfg.height // encoders.vae.scale_factor, cfg.width // encoders.vae.scale_factor)
    noise = [torch.randn(shape, generator=torch_generator(cfg.seed, 0, i, "evaluate")) for i in range(len(prompts))]
    languages = [language_row(language_of(prompt)) for prompt in prompts]
    pictures = draw_pictures(
        network, encoders, prompts, noise, sampler_settings(Path(trained["model"]), cfg.num_steps, cfg.cfg_scale),
        languages=languages if network.config.num_languages else None,
    )  # fmt: skip

    drawn = torch.stack([torch.tensor(picture).permute(2, 0, 1) for picture in pictures])
    spaces = {
        "pixel": lambda images: torch.stack([image.flatten().float() for image in images]),
        "latent": lambda images: torch.stack(
            [
                encoders.moments(f"evaluate-{hash(image.numpy().tobytes())}", lambda i=image: i)[0].flatten()
                for image in images
            ]
        ),
    }
    report: dict = {"weights": source, "num_prompts": len(prompts), "num_candidates": len(candidates)}
    for space, embed in spaces.items():
        ranks = ranks_of_truth(embed(drawn), embed(candidates), torch.tensor(truth))
        by_language = defaultdict(list)
        for language, rank in zip(languages, ranks.tolist(), strict=True):
            by_language[LANGUAGE_ROWS[language]].append(rank)
        for language, found in sorted(by_language.items()):
            report[f"{space}_top1_{language}"] = sum(rank < 1 for rank in found) / len(found)
            report[f"{space}_top5_{language}"] = sum(rank < 5 for rank in found) / len(found)
    folder = Path(cfg.run)
    (folder / "evaluation.json").write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    Image.fromarray(labelled_grid(pictures, prompts, columns=16)).save(folder / "evaluation.png")
    print(json.dumps(report, indent=2, ensure_ascii=False))
    print(f"what it drew: {folder / 'evaluation.png'}")


if __name__ == "__main__":
    run_main(main, parse(Config, __doc__))
