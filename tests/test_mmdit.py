"""The packed MMDiT against `diffusers` QwenImageTransformer2DModel: same weights, same outputs, same gradients."""

import contextlib

import pytest
import torch
from diffusers import QwenImageTransformer2DModel

from model.layout import PackedLayout
from model.mmdit import MMDiT, MMDiTConfig
from model.mmdit_plan import without_gradient

SMALL = dict(
    num_layers=3,
    attention_head_dim=16,
    num_attention_heads=3,
    joint_attention_dim=24,
    in_channels=16,
    out_channels=4,
    axes_dims_rope=(4, 6, 6),
)
# Each sample: its images as (frames, rows, columns), target first; then its text length.
SAMPLES = [
    ([(1, 4, 4)], 5),
    ([(1, 2, 7)], 9),
    ([(1, 5, 3), (1, 3, 8)], 4),
    ([(1, 4, 4)], 5),
    ([(1, 3, 3), (1, 6, 2), (1, 1, 5)], 12),
    ([(1, 2, 2), (1, 4, 6), (1, 7, 7), (1, 3, 2)], 1),
]


@contextlib.contextmanager
def wide_float32(enabled: bool):
    """Make the reference's float32 islands (norms, rotary tables, time embedding) float64 as well."""
    if not enabled:
        yield
        return
    saved = torch.float32, torch.Tensor.float
    torch.float32, torch.Tensor.float = torch.float64, torch.Tensor.double
    try:
        yield
    finally:
        torch.float32, torch.Tensor.float = saved


def build_pair(dtype: torch.dtype, **config) -> tuple[QwenImageTransformer2DModel, MMDiT]:
    """Return the reference and our model with the same random weights."""
    torch.manual_seed(0)
    with wide_float32(dtype == torch.float64):
        reference = QwenImageTransformer2DModel(**SMALL, **config).to(dtype)
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    ours = MMDiT(MMDiTConfig(**SMALL, **config)).to(dtype)
    ours.load_state_dict(reference.state_dict(), strict=True)
    return reference, ours


def random_pack(samples, dtype: torch.dtype, seed: int = 1):
    """Return layout, img, txt, t and an output gradient for a pack of `samples`."""
    generator = torch.Generator().manual_seed(seed)
    layout = PackedLayout.build([images for images, _ in samples], [n for _, n in samples])
    img = torch.randn(len(layout.img_sample), SMALL["in_channels"], generator=generator, dtype=dtype)
    txt = torch.randn(len(layout.txt_sample), SMALL["joint_attention_dim"], generator=generator, dtype=dtype)
    t = torch.rand(len(samples), generator=generator, dtype=torch.float64).to(dtype)
    upstream = torch.randn(len(img), SMALL["in_channels"], generator=generator, dtype=dtype)
    return layout, img, txt, t, upstream


def reference_outputs(reference, samples, layout, img, txt, t) -> torch.Tensor:
    """Run the reference a sample at a time, so that its batch axis cannot matter."""
    outputs = []
    with wide_float32(img.dtype == torch.float64):
        for b, (images, _) in enumerate(samples):
            outputs.append(
                reference(
                    hidden_states=img[layout.img_sample == b][None],
                    encoder_hidden_states=txt[layout.txt_sample == b][None],
                    timestep=t[b : b + 1],
                    img_shapes=[images],
                    return_dict=False,
                )[0][0]
            )
    return torch.cat(outputs)


def relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return ((ours - reference).norm() / reference.norm()).item()


@pytest.mark.parametrize("zero_cond_t", [False, True])
@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_forward_and_every_gradient_equal_diffusers(dtype, bound, zero_cond_t):
    reference, ours = build_pair(dtype, zero_cond_t=zero_cond_t)
    layout, img, txt, t, upstream = random_pack(SAMPLES, dtype)
    inputs = [(img.clone().requires_grad_(), txt.clone().requires_grad_()) for _ in range(2)]

    expected = reference_outputs(reference, SAMPLES, layout, *inputs[0], t)
    with wide_float32(dtype == torch.float64):
        expected.backward(upstream)
    actual = ours(*inputs[1], t, layout)
    actual.backward(upstream)

    assert relative_error(actual, expected) <= bound
    for ours_in, reference_in in zip(inputs[1], inputs[0], strict=True):
        assert relative_error(ours_in.grad, reference_in.grad) <= bound
    ours_parameters = dict(ours.named_parameters())
    compared = 0
    for name, parameter in reference.named_parameters():
        gradient = ours_parameters[name].grad
        if parameter.grad is None or not parameter.grad.any():
            assert gradient is None or not gradient.any(), name
            continue
        # A key's bias adds the same to every score of a query, which softmax removes: its gradient is rounding noise.
        scale = max(parameter.grad.norm().item(), 1e-3 * upstream.norm().item())
        assert (gradient - parameter.grad).norm().item() / scale <= bound, name
        compared += 1
    assert compared > 0.8 * len(ours_parameters)


def test_state_dict_has_exactly_the_released_keys_and_shapes():
    reference, ours = build_pair(torch.float32)
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in reference.state_dict().items()}
    reference.load_state_dict(ours.state_dict(), strict=True)


def test_full_size_model_has_the_released_parameter_count():
    with torch.device("meta"):
        ours, reference = MMDiT(MMDiTConfig()), QwenImageTransformer2DModel()
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in reference.parameters())
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in reference.state_dict().items()}


def test_a_packed_sample_equals_that_sample_alone():
    for zero_cond_t in (False, True):
        _, ours = build_pair(torch.float64, zero_cond_t=zero_cond_t)
        layout, img, txt, t, _ = random_pack(SAMPLES, torch.float64)
        packed = ours(img, txt, t, layout)
        for b, (images, num_txt) in enumerate(SAMPLES):
            alone = PackedLayout.build([images], [num_txt])
            expected = ours(img[layout.img_sample == b], txt[layout.txt_sample == b], t[b : b + 1], alone)
            assert relative_error(packed[layout.img_sample == b], expected) <= 1e-10


def test_neighbours_cannot_leak_even_nan():
    _, ours = build_pair(torch.float32)
    layout, img, txt, t, _ = random_pack(SAMPLES, torch.float32)
    clean = ours(img, txt, t, layout)
    img[layout.img_sample == 2] = float("nan")
    poisoned = ours(img, txt, t, layout)
    assert torch.equal(poisoned[layout.img_sample != 2], clean[layout.img_sample != 2])
    assert poisoned[layout.img_sample == 2].isnan().all()


def test_rotary_survives_a_dtype_cast():
    _, ours = build_pair(torch.float32)
    layout, img, txt, t, _ = random_pack(SAMPLES, torch.float32)
    before = ours(img, txt, t, layout)
    there_and_back = ours.to(torch.bfloat16).to(torch.float32)
    with torch.no_grad():
        for parameter, kept in zip(there_and_back.parameters(), build_pair(torch.float32)[1].parameters(), strict=True):
            parameter.copy_(kept)
    assert torch.equal(there_and_back(img, txt, t, layout), before)


def test_bfloat16_stays_near_float32():
    _, ours = build_pair(torch.float32)
    layout, img, txt, t, _ = random_pack(SAMPLES, torch.float32)
    expected = ours(img, txt, t, layout)
    assert relative_error(ours.to(torch.bfloat16)(img, txt, t, layout).float(), expected) < 0.05


def test_untrained_language_embedding_changes_nothing():
    _, plain = build_pair(torch.float32)
    extended = MMDiT(MMDiTConfig(**SMALL, num_languages=3))
    missing, unexpected = extended.load_state_dict(plain.state_dict(), strict=False)
    assert missing == ["language_embed.weight"] and not unexpected
    torch.nn.init.zeros_(extended.language_embed.weight)
    layout, img, txt, t, _ = random_pack(SAMPLES, torch.float32)
    language = torch.arange(len(SAMPLES)) % 3
    assert torch.equal(extended(img, txt, t, layout, language), plain(img, txt, t, layout))
    with pytest.raises(ValueError, match="language"):
        extended(img, txt, t, layout)


@pytest.mark.parametrize(
    "change, message",
    [({"axes_dims_rope": (4, 4, 4)}, "axes_dims_rope"), ({"guidance_embeds": True}, "guidance")],
)
def test_bad_configuration_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        MMDiTConfig(**{**SMALL, **change})


def test_the_parameters_without_a_gradient_are_known():
    _, network = build_pair(torch.float32)
    layout, img, txt, t, _ = random_pack(SAMPLES, torch.float32)
    network(img, txt, t, layout).sum().backward()
    unused = {id(parameter) for parameter in without_gradient(network)}
    assert {id(p) for p in network.parameters() if p.grad is None} == unused and len(unused) == 6
