"""Low-rank adapters on one process and through the command line: what is trained, kept, resumed and refused."""

import hashlib
import shutil

import pytest
import torch

from model.mmdit import MMDiT, MMDiTConfig, init_parameter
from model.mmdit_plan import LORA_TARGETS, without_gradient
from parallel import checkpoint
from parallel.fingerprint import fingerprint
from parallel.init_weights import materialize
from parallel.lora import apply_lora, base_parameters, base_record, is_adapter, released_name, trained_parameters
from parallel.weights import read_safetensors
from tests.released_folder import TINY, make_released
from tests.run_folder import SMALL
from tests.test_parallel_parity import CONFIG, SAMPLES, losses
from tests.test_train_mmdit import metrics, samples_seen, state, train

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The tiny folder with random weights."""
    return make_released(tmp_path_factory.mktemp("lora") / "model", MMDiTConfig.from_folder(TINY / "transformer"))


def adapted(config=CONFIG, weights=None, seed=3, **options) -> MMDiT:
    with torch.device("meta"):
        network = MMDiT(config)
    settings = {"targets": LORA_TARGETS, "rank": 4, "alpha": 8.0} | options
    apply_lora(network, skip=without_gradient(network), **settings)
    materialize(network, CPU, init_parameter, seed, weights)
    return network


def plain(config=CONFIG, weights=None, seed=3) -> MMDiT:
    with torch.device("meta"):
        network = MMDiT(config)
    materialize(network, CPU, init_parameter, seed, weights)
    return network


def digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {n: hashlib.sha256(t.detach().contiguous().numpy().tobytes()).hexdigest() for n, t in tensors.items()}


# ---- One process ----------------------------------------------------------------------------------------------------


def test_released_weights_load_into_the_base(tmp_path):
    folder = make_released(tmp_path / "small", SMALL) / "transformer"
    network, released = adapted(SMALL, folder), read_safetensors(folder)
    assert digests(base_parameters(network)) == digests(released)
    trained = trained_parameters(network)
    assert trained.keys() == {released_name(n) for n, _ in network.named_parameters() if is_adapter(n)}
    layers = {name.partition(".lora_")[0] for name in trained}
    assert {f"{layer}.weight" for layer in layers} < released.keys() and len(trained) == 2 * len(layers)
    assert not any("txt_mlp" in x or "to_add_out" in x for x in layers if x.startswith("transformer_blocks.1."))
    for name, factor in trained.items():
        rows, columns = released[name.partition(".lora_")[0] + ".weight"].shape
        assert factor.shape == ((4, columns) if "lora_A" in name else (rows, 4)) and factor.dtype == torch.float32
        # B is zero, A uniform within 1 / √in.
        largest = factor.abs().max().item()
        assert largest == 0 if "lora_B" in name else 0.7 * columns**-0.5 < largest <= columns**-0.5


def test_a_rank_that_is_more_than_a_layer_has_is_named(caplog):
    with caplog.at_level("WARNING"):
        adapted(rank=16)
        assert not caplog.messages
        adapted(rank=5000)
    assert "--lora_rank 5000 is more than" in caplog.text and "adapted layers have of their own" in caplog.text


def test_first_values_belong_to_seed_and_name():
    once, again, other = (trained_parameters(adapted(seed=seed)) for seed in (3, 3, 4))
    assert digests(once) == digests(again)
    down = [name for name in once if "lora_A" in name]
    assert len({digests(once)[name] for name in down}) == len(down)
    assert not any(torch.equal(once[name], other[name]) for name in down)
    # A base that is drawn is drawn as without adapters.
    assert digests(base_parameters(adapted())) == digests(dict(plain().named_parameters()))


def test_the_first_step_sees_the_base_and_training_leaves_it(tmp_path):
    network, base = adapted(dropout=0.3), plain()
    for p, q in zip(base_parameters(network).values(), base.parameters(), strict=True):
        torch.nn.init.normal_(p, std=0.2, generator=torch.Generator().manual_seed(p.numel()))
        q.data.copy_(p)
    chosen = list(range(len(SAMPLES)))
    with torch.no_grad():
        assert torch.equal(losses(network, chosen, 0, torch.float32), losses(base, chosen, 0, torch.float32))
    before, record = digests(base_parameters(network)), base_record(network)
    trained = trained_parameters(network)
    optimizer = torch.optim.AdamW(trained.values(), lr=0.1, weight_decay=0.1)
    for step in range(3):
        losses(network, chosen, step, torch.float32).mean().backward()
        assert not any(p.grad is not None for p in base_parameters(network).values())
        optimizer.step()
        optimizer.zero_grad()
    assert digests(base_parameters(network)) == before and base_record(network) == record
    assert record["base"]["dtype"] == "float32" and base_record(base) == {}
    with torch.no_grad():
        first, second = (losses(network, chosen, 0, torch.float32) for _ in range(2))
        assert torch.equal(first, second)  # nothing is dropped where nothing is learned
        assert (first - losses(base, chosen, 0, torch.float32)).abs().max() > 0.1


@pytest.mark.parametrize(
    "options, words",
    [
        ({"targets": ("transformer_blocks.*.attn.to_x",)}, "to_x.* matches no linear layer"),
        ({"targets": ("transformer_blocks.*.attn",)}, "matches no linear layer"),
        ({"targets": ("transformer_blocks.1.txt_mlp.net.2",)}, "no layer of them has an effect"),
        ({"rank": -1}, "--lora_rank must be at least 1"),
        ({"alpha": -2.0}, "--lora_alpha above 0"),
        ({"dropout": 1.0}, r"--lora_dropout in \[0, 1\)"),
    ],
)
def test_wrong_settings_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        adapted(**options)


def test_a_fingerprint_sees_every_bit():
    random = torch.Generator().manual_seed(0)
    tensors = {"a.weight": torch.randn(5, 7, generator=random), "b.bias": torch.randn(6, generator=random)}
    tensors["c.weight"] = torch.randn(3, 4, generator=random).bfloat16()
    found = {fingerprint(tensors.items()), fingerprint(reversed(tensors.items()))}
    assert len(found) == 1
    integers, count = {2: torch.int16, 4: torch.int32}, 1
    for name, tensor in tensors.items():
        for bit in (0, 7, 8 * tensor.element_size() - 2):
            for i in range(tensor.numel()):
                changed = tensor.clone()
                changed.view(integers[tensor.element_size()]).view(-1)[i] ^= 1 << bit
                found.add(fingerprint((tensors | {name: changed}).items()))
                count += 1
        found |= {fingerprint((tensors | {name: change}).items()) for change in (tensor.flip(0), -tensor)}
        count += 2
    square = torch.randn(4, 4, generator=random)
    found |= {fingerprint({"x": x}.items()) for x in (square, square.T, square.view(2, 8), square.double())}
    assert len(found) == count + 4


# ---- Through the command line ---------------------------------------------------------------------------------------

LORA = ["--lora_rank", "4", "--lora_alpha", "8", "--lora_dropout", "0.2", "--save_every", "2", "--lr", "0.01"]


@pytest.fixture(scope="module")
def undisturbed(cache, model, tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "undisturbed"
    train(cache, run, "--model", str(model), *LORA, "--num_steps", "4", ranks=2)
    return run


def test_a_checkpoint_holds_adapters_and_the_record_of_the_base(undisturbed, model):
    tensors = state(undisturbed, 4)
    assert {name.partition(".")[0] for name in tensors} == {"model", "ema", "optimizer"}
    assert all(is_adapter(name) for name in tensors) and not any("default" in name for name in tensors)
    assert any(tensors[name].any() for name in tensors if name.startswith("model.") and "lora_B" in name)
    record = checkpoint.StoredTensors(undisturbed / "checkpoints", 4).state["base"]
    weights = read_safetensors(model / "transformer")
    assert record == {"dtype": "float32", "fingerprint": fingerprint(weights.items())}
    stored = sum(t.numel() for n, t in tensors.items() if n.startswith("model."))
    assert stored < 0.2 * sum(t.numel() for t in weights.values())


def test_resumed_run_is_the_undisturbed_one_to_the_bit(cache, model, undisturbed, tmp_path):
    resumed = tmp_path / "resumed"
    train(cache, resumed, "--model", str(model), *LORA, "--num_steps", "2", ranks=2)
    train(cache, resumed, "--model", str(model), *LORA, "--num_steps", "4", ranks=2)
    expected, actual = state(undisturbed, 4), state(resumed, 4)
    assert expected.keys() == actual.keys() and all(torch.equal(actual[name], expected[name]) for name in expected)
    assert samples_seen(resumed) == samples_seen(undisturbed)
    assert [m["loss"] for m in metrics(resumed)] == [m["loss"] for m in metrics(undisturbed)]


def test_step_0_is_the_base_and_tensor_parallel_learns_the_same(cache, model, tmp_path):
    whole, alone, cut = (tmp_path / name for name in ("whole", "alone", "cut"))
    flags = ["--model", str(model), "--num_steps", "3", "--save_every", "0"]
    train(cache, whole, *flags)
    train(cache, alone, *flags, "--lora_rank", "4")
    train(cache, cut, *flags, "--lora_rank", "4", "--tp", "2", "--activation_checkpointing", "full", ranks=2)
    first, second, third = ([m["loss"] for m in metrics(run)] for run in (whole, alone, cut))
    assert second[0] == first[0] and second[1:] != first[1:]
    assert third == pytest.approx(second, rel=1e-5)


def test_another_base_is_refused_on_resume(cache, model, undisturbed, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run)
    path = sorted((model / "transformer").glob("*.safetensors"))[0]
    content = bytearray(path.read_bytes())
    content[-1] ^= 0x40
    kept = path.read_bytes()
    try:
        path.write_bytes(content)
        printed = train(cache, run, "--model", str(model), *LORA, "--num_steps", "6", ranks=2, expect=2)
    finally:
        path.write_bytes(kept)
    assert "error: the adapters were trained on another base" in printed, printed


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--lora_rank", "4"], "--model needs them"),
        (["--lora_rank", "4", "--from_scratch"], "--model needs them"),
        (["--lora_rank", "4", "--num_languages", "3"], "no new --num_languages"),
        (["--lora_rank", "4", "--lora_targets", "blocks.*"], "'blocks.*' matches no linear layer"),
    ],
)
def test_bad_input_is_one_clear_message(cache, model, tmp_path, flags, words):
    given = ["--model", str(model)] if len(flags) > 2 else []
    printed = train(cache, tmp_path / "run", *given, *flags, "--num_steps", "1", expect=2)
    assert words in printed and "Traceback" not in printed
