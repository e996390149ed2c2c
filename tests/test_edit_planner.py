"""The planner against `transformers`: its loss with labels, its generate; and against `TextEncoder.encode`."""

import pytest
import torch

from model.edit_planner import Planner, PlannerInput, backward_through_states
from model.templates import END_OF_TURN
from model.text_encoder import TextEncoder
from tests.edit_pipeline import TINY, as_tensor, random_picture

IGNORED = -100  # what the library's loss leaves out
SIZES = [(96, 96), (64, 128), (128, 64)]
ANSWERS = [
    '[{"action":"remove","target":"dog face","bbox":[10,20,480,900]}]',
    '[{"action":"replace","target":"红苹果","object":"狗脸"}]',
    "[]",
    None,
]


def make_planner(**options) -> Planner:
    return Planner(TextEncoder.from_folder(TINY, torch.device("cpu"), with_vision=True), **options)


def make_samples() -> list[PlannerInput]:
    """0 to 3 references, both languages, answers of all lengths and none."""
    instructions = ["Remove the dog.", "把红苹果换成狗脸", "x", "Leave it as it is, please."]
    return [
        PlannerInput(text, [as_tensor(random_picture(*SIZES[j], seed=10 * i + j)) for j in range(i)], ANSWERS[i])
        for i, text in enumerate(instructions)
    ]


def make_batch() -> list[PlannerInput]:
    """More rows than are read at a time, in no order of length; in one a line end joins that of the shared prefix."""
    joined = PlannerInput("\n\nMake it red.", [], ANSWERS[0])
    return [*make_samples(), joined, *make_samples()[::-1]]


@pytest.fixture(scope="module")
def planner():
    return make_planner()


def library_inputs(planner: Planner, sample: PlannerInput) -> tuple[dict, torch.Tensor]:
    """Return what the whole model takes for one sample with its answer, and the labels of the answer."""
    edit = planner.text.edit_tokens(sample.instruction, [tuple(p.shape[1:]) for p in sample.pictures])
    answer = planner.text.tokenizer(sample.answer + END_OF_TURN, add_special_tokens=False)["input_ids"]
    labels = torch.tensor([[IGNORED] * len(edit.ids) + answer])
    return planner.text.model_inputs([edit.ids + answer], sample.pictures), labels


@pytest.mark.parametrize("i", range(3))
def test_the_loss_is_the_library_s_with_labels(planner, i):
    sample = make_samples()[i]
    inputs, labels = library_inputs(planner, sample)
    expected = planner.vlm(**inputs, labels=labels).loss
    output = planner([sample])
    torch.testing.assert_close(output.loss_per_sample, expected[None], atol=1e-5, rtol=1e-5)
    assert output.has_answer.tolist() == [True]


def test_the_states_are_those_of_the_text_encoder(planner):
    """Whatever the answer is: the text's states know nothing of it."""
    samples = make_batch()
    for sample, states in zip(samples, planner(samples).states, strict=True):
        expected = planner.text.encode(sample.instruction, sample.pictures)
        assert states.shape == expected.shape
        torch.testing.assert_close(states, expected, atol=2e-5, rtol=1e-5)


def test_a_batch_equals_one_by_one():
    samples = make_batch()
    planner = make_planner()
    together = planner(samples)
    together.loss_per_sample.sum().backward()
    gradients = {name: p.grad.clone() for name, p in planner.named_parameters()}
    planner.zero_grad()
    for i, sample in enumerate(samples):
        alone = planner([sample])
        torch.testing.assert_close(alone.loss_per_sample[0], together.loss_per_sample[i], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(alone.states[0], together.states[i], atol=2e-5, rtol=1e-5)
        assert alone.has_answer.item() == together.has_answer[i].item() == (sample.answer is not None)
        assert alone.is_exact.item() == together.is_exact[i].item()
        alone.loss_per_sample.sum().backward()
    for name, parameter in planner.named_parameters():
        scale = gradients[name].abs().max().item()
        torch.testing.assert_close(parameter.grad, gradients[name], atol=2e-5 * max(scale, 1e-3), rtol=1e-4)


@pytest.mark.parametrize("freeze_vision", [False, True])
@pytest.mark.parametrize("case", ["no pictures", "no answers"])
def test_every_trained_parameter_gets_a_gradient_in_every_pass(freeze_vision, case):
    """DDP waits for it; with nothing to see or to say it is 0."""
    planner = make_planner(freeze_vision=freeze_vision)
    samples = make_samples()
    samples = samples[:1] if case == "no pictures" else samples[3:]
    output = planner(samples)
    assert output.loss_per_sample.isfinite().all()
    output.loss_per_sample.sum().backward()
    trained = {name: p for name, p in planner.named_parameters() if p.requires_grad}
    assert all(p.grad is not None for p in trained.values())
    seen = {name for name, p in trained.items() if p.grad.any()}
    assert any("language_model" in name for name in seen) == (case == "no pictures")
    assert not any("visual" in name for name in seen)
    assert any("visual" in name for name in trained) == (not freeze_vision)


def read_by_a_renderer(states: list[torch.Tensor]) -> torch.Tensor:
    return sum((own.float() ** 2 @ torch.arange(own.shape[1]).float()).sum() for own in states) / 1000


def test_gradients_through_the_states_are_those_of_one_graph():
    samples, gradients = make_samples(), []
    for in_one_graph in (True, False):
        planner = make_planner()
        output = planner(samples)
        loss = output.loss_per_sample.sum()
        if in_one_graph:
            (loss + read_by_a_renderer(output.states)).backward()
        else:
            guides = [own.detach().requires_grad_() for own in output.states]
            read_by_a_renderer(guides).backward()
            backward_through_states(loss, output.states, guides)
        gradients.append({name: p.grad for name, p in planner.named_parameters()})
    alone = make_planner()
    output = alone(samples)
    loss, guides = output.loss_per_sample.sum(), [own.detach() for own in output.states]
    backward_through_states(loss, output.states, guides)
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(gradients[1][name], gradients[0][name], atol=1e-4, rtol=1e-4)
        assert not torch.allclose(parameter.grad, gradients[0][name], atol=1e-4, rtol=1e-4), name


def test_it_learns_a_plan_by_heart_and_says_it(planner):
    """After a few steps the greedy answer is the plan, and is_exact says so; the text encoder sees what was learned."""
    planner = make_planner()
    samples = make_samples()[:3]
    before = planner.text.encode(samples[1].instruction, samples[1].pictures)
    assert not planner(samples).is_exact.any()
    optimizer = torch.optim.AdamW(planner.parameters(), lr=3e-3)
    for _ in range(150):
        output = planner(samples)
        if output.is_exact.all():
            break
        optimizer.zero_grad()
        output.loss_per_sample.sum().backward()
        optimizer.step()
    assert planner(samples).is_exact.all()
    assert [planner.generate(s.instruction, s.pictures) for s in samples] == [s.answer for s in samples]
    assert not torch.equal(planner.text.encode(samples[1].instruction, samples[1].pictures), before)


@pytest.mark.parametrize("num_pictures", [0, 2])
def test_generate_is_the_library_s_without_a_cache(planner, num_pictures):
    """Token by token, each from a whole forward pass."""
    sample = make_samples()[num_pictures]
    text, end = planner.text, planner.text.tokenizer.convert_tokens_to_ids(END_OF_TURN)
    ids = list(text.edit_tokens(sample.instruction, [tuple(p.shape[1:]) for p in sample.pictures]).ids)
    answer = []
    with torch.no_grad():
        while len(answer) < 12 and (not answer or answer[-1] != end):
            logits = planner.vlm(**text.model_inputs([ids + answer], sample.pictures)).logits[0, -1]
            answer.append(int(logits.argmax()))
    expected = text.tokenizer.decode([token for token in answer if token != end])
    assert planner.generate(sample.instruction, sample.pictures, max_new_tokens=12) == expected


def test_encoding_after_generating_is_as_before(planner):
    """The library's model remembers positions from its last answer."""
    one, other = make_samples()[2], make_samples()[0]
    before = [planner.text.encode(s.instruction, s.pictures) for s in (one, other)]
    planner.generate(one.instruction, one.pictures, max_new_tokens=3)
    after = [planner.text.encode(s.instruction, s.pictures) for s in (one, other)]
    assert all(map(torch.equal, before, after))


def test_what_is_frozen_stays_and_saves_its_gradients():
    planner = make_planner(freeze_vision=True)
    frozen = {name for name, p in planner.named_parameters() if not p.requires_grad}
    assert frozen == {name for name, _ in planner.named_parameters() if ".visual." in name} != set()
    planner(make_samples()).loss_per_sample.sum().backward()
    assert all((p.grad is None) == (name in frozen) for name, p in planner.named_parameters())
