"""A micro-batch of pictures alone and of pictures with references, against what each sample says by itself."""

import torch

from model import flow
from model.latents import patchify
from model.micro_batch import MicroBatch

SHAPES = [[(4, 6)], [(4, 4), (2, 6), (6, 2)], [(2, 2), (4, 2)]]  # latent rows and columns: target, then references
TXT_LENS = [3, 5, 2]


def new_batch(chosen: list[int], weighted: bool) -> MicroBatch:
    samples = []
    for i in chosen:
        random = torch.Generator().manual_seed(i)
        images = [torch.randn(3, *shape, generator=random) for shape in SHAPES[i]]
        noise = torch.randn(images[0].shape, generator=random)
        token_weight = torch.rand(images[0][0].numel() // 4, generator=random) + 0.1
        samples.append((images, noise, torch.randn(TXT_LENS[i], 7, generator=random), torch.rand((), generator=random)))
        samples[-1] += (token_weight,)
    images, noise, txt, times, token_weights = zip(*samples, strict=True)
    labels = torch.ones(len(chosen)), torch.tensor(chosen), torch.tensor(chosen) - 1
    return MicroBatch.build(images, noise, txt, times, labels, token_weights if weighted else None)


def losses(batch: MicroBatch) -> torch.Tensor:
    """Return the losses of a network that answers each token with its square."""
    x_t = flow.interpolate(batch.x0, batch.noise, batch.t, batch.layout)
    target = flow.velocity_target(batch.x0, batch.noise)
    return flow.loss_per_sample(x_t.square(), target, batch.layout, batch.token_weight)


def test_samples_packed_together_have_the_losses_they_have_alone():
    for weighted in (False, True):
        together = losses(new_batch([0, 1, 2], weighted))
        alone = torch.cat([losses(new_batch([i], weighted)) for i in range(3)])
        torch.testing.assert_close(together, alone)
        assert len(set(together.tolist())) == 3


def test_references_are_clean_and_the_loss_is_that_of_the_target():
    batch = new_batch([1], weighted=True)
    random = torch.Generator().manual_seed(1)
    target, wide, tall = (torch.randn(3, *shape, generator=random) for shape in SHAPES[1])
    noise = torch.randn(target.shape, generator=random)
    x0, eps = patchify(target), patchify(noise)
    assert torch.equal(batch.x0, torch.cat((x0, patchify(wide), patchify(tall))))
    assert torch.equal(batch.noise[: len(eps)], eps) and not batch.noise[len(eps) :].any()
    assert torch.equal(flow.interpolate(batch.x0, batch.noise, batch.t, batch.layout)[len(x0) :], batch.x0[len(x0) :])
    weight = torch.rand(len(x0), generator=random) + 0.1
    t = batch.t[0]
    error = (((1 - t) * x0 + t * eps).square() - (eps - x0)).square().mean(dim=1)
    torch.testing.assert_close(losses(batch)[0], (error * weight).sum() / weight.sum())


def test_filled_it_has_the_same_losses_and_says_how_many_tokens_are_real():
    for weighted in (False, True):
        batch = new_batch([0, 2], weighted)
        filled = batch.filled([(20, 12, 4)])
        assert (len(filled.x0), len(filled.txt), len(filled.t)) == (20, 12, 4)
        assert filled.num_tokens == batch.num_tokens == len(batch.x0) + len(batch.txt) == 9 + 2 + 5 - 2
        torch.testing.assert_close(losses(filled)[:2], losses(batch))
        assert not losses(filled)[2:].any() and not filled.weight[2:].any()
        assert batch.filled(None) is batch
