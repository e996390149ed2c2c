"""Text states against `diffusers`' own pipeline, which encodes padded batches, on the tiny folder."""

from pathlib import Path

import pytest
import torch
from diffusers import QwenImagePipeline
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import QwenImageEditPlusPipeline
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from model.templates import EDIT_PREFIX, MAX_TOKENS, SUFFIX, TEXT_TO_IMAGE_PREFIX
from model.text_encoder import TextEncoder
from parallel.fsdp import gathered, shard_frozen
from parallel.mesh import build_mesh
from tests.spawn import run_ranks

TINY = Path(__file__).resolve().parent.parent / "assets" / "tiny"
PROMPTS = [
    "dog face", "狗脸", "", " ", "浅蓝色背景上，左边是狗脸，右边是红苹果", "a long line " * 30, "\nleading newline",
    "émoji 🐶 мир",
]  # fmt: skip


@pytest.fixture(scope="module")
def encoder():
    return TextEncoder.from_folder(TINY, torch.device("cpu"))


@pytest.fixture(scope="module")
def pipeline():
    """The released pipeline class with the tiny folder's tokenizer and text encoder."""
    return QwenImagePipeline(
        scheduler=None,
        vae=None,
        text_encoder=Qwen2_5_VLForConditionalGeneration.from_pretrained(TINY / "text_encoder", dtype=torch.float32),
        tokenizer=AutoTokenizer.from_pretrained(TINY / "tokenizer"),
        transformer=None,
    )


def test_states_equal_the_pipelines(encoder, pipeline):
    padded, mask = pipeline._get_qwen_prompt_embeds(PROMPTS, device="cpu", dtype=torch.float32)
    for prompt, states, kept in zip(PROMPTS, padded, mask, strict=True):
        ours = encoder.encode(prompt)
        assert len(ours) == kept.sum() == encoder.count_tokens(prompt)
        torch.testing.assert_close(ours, states[: len(ours)], atol=1e-5, rtol=1e-5)


def test_templates_are_the_pipelines_and_their_lengths_the_released_ones(encoder, pipeline):
    assert pipeline.prompt_template_encode == TEXT_TO_IMAGE_PREFIX + "{}" + SUFFIX
    assert encoder.num_prefix_tokens == pipeline.prompt_template_encode_start_idx == 34
    edit = QwenImageEditPlusPipeline(
        scheduler=None, vae=None, text_encoder=None, tokenizer=None, processor=None, transformer=None
    )
    assert edit.prompt_template_encode == EDIT_PREFIX + "{}" + SUFFIX
    assert len(encoder.tokenizer(EDIT_PREFIX)["input_ids"]) == edit.prompt_template_encode_start_idx == 64


def test_too_long_a_caption_is_cut_and_counted(encoder):
    before = encoder.num_truncated
    caption = "狗" * 3000
    assert len(encoder.encode(caption)) == encoder.count_tokens(caption) == MAX_TOKENS
    assert encoder.num_truncated == before + 1
    encoder.encode("dog")
    assert encoder.num_truncated == before + 1


def test_tokenizer_round_trips_any_text(encoder):
    for text in [*PROMPTS, "tab\t and\r\nbreaks  and   spaces", "∑∫ ꙮ 𝔘𝔫𝔦", "👨‍👩‍👧‍👦"]:
        assert encoder.tokenizer.decode(encoder.tokenizer(text)["input_ids"]) == text


def test_both_languages_mean_the_same(encoder):
    """The nearest of the other language's names, by mean state, is the translation."""
    pairs = [
        ("dog face", "狗脸"),
        ("red apple", "红苹果"),
        ("rocket", "火箭"),
        ("guitar", "吉他"),
        ("pizza", "披萨"),
        ("sun", "太阳"),
    ]

    def mean_states(names):
        return torch.nn.functional.normalize(torch.stack([encoder.encode(n).mean(0) for n in names]), dim=-1)

    similarity = mean_states([en for en, _ in pairs]) @ mean_states([zh for _, zh in pairs]).T
    assert similarity.argmax(1).tolist() == similarity.argmax(0).tolist() == list(range(len(pairs)))


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match="tokenizer/"):
        TextEncoder.from_folder(tmp_path, torch.device("cpu"))


def encode_on_ranks(rank: int, world_size: int) -> tuple[list[torch.Tensor], int, int]:
    """Encode, on each rank another number of captions; return the states and how many numbers the rank kept."""
    encoder = TextEncoder.from_folder(TINY, torch.device("cpu"))
    whole = sum(p.numel() for p in encoder.language_model.parameters())
    shard_frozen(encoder.language_model, build_mesh("cpu")["dp_shard"])
    mine, states = [PROMPTS[: 3 + rank], PROMPTS[5:], []], []
    for prompts in mine[rank:] + mine[:rank]:  # in one of the turns a rank has nothing to encode
        with gathered(encoder.language_model):
            states += [encoder.encode(prompt) for prompt in prompts]
    kept = sum(p.to_local().numel() for p in encoder.language_model.parameters())
    return states, kept, whole


def test_a_sharded_encoder_gives_the_same_states_however_many_each_rank_needs(encoder):
    for rank, (states, kept, whole) in enumerate(run_ranks(encode_on_ranks, 2)):
        turns = [PROMPTS[: 3 + rank], PROMPTS[5:], []]
        prompts = [prompt for turn in turns[rank:] + turns[:rank] for prompt in turn]
        assert len(states) == len(prompts) and all(
            torch.equal(ours, encoder.encode(prompt)) for ours, prompt in zip(states, prompts, strict=True)
        )
        assert kept < 0.51 * whole
