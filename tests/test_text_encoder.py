"""Text states and tokens against `diffusers`' own pipelines, which encode padded batches, on the tiny folder."""

import json
import random
import shutil
import sys
import unicodedata
from pathlib import Path

import pytest
import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import QwenImageEditPlusPipeline
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration
from transformers.utils import logging as transformers_logging

from data.emoji import small_list
from data.emoji_table import load_emoji
from model.templates import EDIT_PREFIX, MAX_TOKENS, SUFFIX, TEXT_TO_IMAGE_PREFIX
from model.text_encoder import TextEncoder
from tools import tiny_text, tiny_tokenizer

TINY = Path(__file__).resolve().parent.parent / "assets" / "tiny"
CPU = torch.device("cpu")
PROMPTS = [
    "dog face", "狗脸", "", " ", "浅蓝色背景上，左边是狗脸，右边是红苹果", "a long line " * 30, "\nleading newline",
    "  leading spaces", "trailing newline\n", "braces {} {0}", "émoji 🐶 мир", "狗" * 3000,
]  # fmt: skip


@pytest.fixture(scope="module")
def encoder():
    return TextEncoder.from_folder(TINY, CPU)


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


def copy_of(source, folder):
    """Copy a folder so that it can be damaged."""
    return Path(shutil.copytree(source, folder))


# ---- States ---------------------------------------------------------------------------------------------------------


def test_states_equal_the_pipelines(encoder, pipeline):
    padded, mask = pipeline._get_qwen_prompt_embeds(PROMPTS, device="cpu", dtype=torch.float32)
    for prompt, states, kept in zip(PROMPTS, padded, mask, strict=True):
        ours = encoder.encode(prompt)
        assert len(ours) == kept.sum() == encoder.count_tokens(prompt)
        torch.testing.assert_close(ours, states[: len(ours)], atol=1e-5, rtol=1e-5)


def test_only_what_encodes_text_is_kept_and_it_is_frozen(encoder):
    names = dict(encoder.named_parameters())
    assert all(name.startswith("language_model.") for name in names) and not any("lm_head" in name for name in names)
    assert not any(parameter.requires_grad for parameter in names.values()) and not encoder.training
    assert not encoder.encode("dog face").requires_grad


def test_it_computes_in_the_given_dtype(encoder):
    states = TextEncoder.from_folder(TINY, CPU, torch.bfloat16).encode("dog face")
    assert states.dtype == torch.bfloat16
    torch.testing.assert_close(states.float(), encoder.encode("dog face"), atol=0.1, rtol=0.1)


def test_only_a_caption_beyond_the_limit_is_cut_and_counted(encoder):
    before = encoder.num_truncated
    per_character = (encoder.count_tokens("狗" * 11) - encoder.count_tokens("狗")) // 10
    longest = (MAX_TOKENS - encoder.count_tokens("")) // per_character
    assert len(encoder.encode("狗" * longest)) == encoder.count_tokens("狗" * longest) == MAX_TOKENS
    assert encoder.num_truncated == before
    assert len(encoder.encode("狗" * (longest + 1))) == encoder.count_tokens("狗" * (longest + 1)) == MAX_TOKENS
    assert encoder.num_truncated == before + 1


def test_the_released_pipeline_runs_on_the_tiny_folder(tmp_path, encoder):
    folder = copy_of(TINY, tmp_path / "tiny")
    config = QwenImageTransformer2DModel.load_config(folder / "transformer")
    torch.manual_seed(0)
    QwenImageTransformer2DModel.from_config(config).save_pretrained(folder / "transformer")
    pipeline = QwenImagePipeline.from_pretrained(folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    states, mask = pipeline.encode_prompt("dog face", device="cpu")
    assert mask is None or mask.all()
    torch.testing.assert_close(states[0], encoder.encode("dog face"), atol=1e-5, rtol=1e-5)
    pictures = pipeline("dog face", height=64, width=96, num_inference_steps=2, output_type="np").images
    assert pictures.shape == (1, 64, 96, 3)


# ---- Tokens ---------------------------------------------------------------------------------------------------------


def test_templates_are_the_pipelines_and_their_lengths_the_released_ones(encoder, pipeline):
    assert pipeline.prompt_template_encode == TEXT_TO_IMAGE_PREFIX + "{}" + SUFFIX
    assert pipeline.tokenizer_max_length == MAX_TOKENS
    assert encoder.num_prefix_tokens == pipeline.prompt_template_encode_start_idx == 34
    edit = QwenImageEditPlusPipeline(
        scheduler=None, vae=None, text_encoder=None, tokenizer=None, processor=None, transformer=None
    )
    assert edit.prompt_template_encode == EDIT_PREFIX + "{}" + SUFFIX
    assert len(encoder.tokenizer(EDIT_PREFIX)["input_ids"]) == edit.prompt_template_encode_start_idx == 64


def test_the_chat_template_writes_our_template(encoder):
    system = TEXT_TO_IMAGE_PREFIX.split("system\n")[1].split("<|im_end|>")[0]
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "dog face"}]
    text = encoder.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == TEXT_TO_IMAGE_PREFIX + "dog face" + SUFFIX


def test_each_added_token_is_one_token_that_the_model_knows(encoder):
    added = tiny_tokenizer.SPECIAL_TOKENS + tiny_tokenizer.OTHER_ADDED_TOKENS
    ids = [encoder.tokenizer(token)["input_ids"] for token in added]
    assert len(added) == 22 and ids == [[ids[0][0] + i] for i in range(22)]
    config = json.loads((TINY / "text_encoder" / "config.json").read_text())
    for name in ("image", "video"):
        assert encoder.tokenizer.convert_tokens_to_ids(f"<|{name}_pad|>") == config[f"{name}_token_id"]
    for name in ("start", "end"):
        assert encoder.tokenizer.convert_tokens_to_ids(f"<|vision_{name}|>") == config[f"vision_{name}_token_id"]
    assert len(encoder.tokenizer) == config["text_config"]["vocab_size"]


def test_tokenizer_round_trips_any_text(encoder):
    rng = random.Random(0)
    texts = [*PROMPTS, "tab\t and\r\nbreaks  and   spaces", "∑∫ ꙮ 𝔘𝔫𝔦", "👨‍👩‍👧‍👦"]
    # Any code points but surrogates, which are no text.
    points = [c for c in range(sys.maxunicode + 1) if not 0xD800 <= c <= 0xDFFF]
    texts += ["".join(map(chr, rng.sample(points, 20))) for _ in range(200)]
    texts += ["".join(chr(rng.randrange(32, 0x3000)) for _ in range(20)) for _ in range(200)]
    for text in texts:
        decoded = encoder.tokenizer.decode(encoder.tokenizer(text)["input_ids"])
        assert decoded == unicodedata.normalize("NFC", text)


def test_a_tokenizer_in_the_released_files_counts_the_same(encoder, tmp_path):
    """The released folder has vocab.json and merges.txt where ours has tokenizer.json."""
    folder = copy_of(TINY, tmp_path / "tiny")
    whole = json.loads((folder / "tokenizer" / "tokenizer.json").read_text())
    (folder / "tokenizer" / "tokenizer.json").unlink()
    (folder / "tokenizer" / "vocab.json").write_text(json.dumps(whole["model"]["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in whole["model"]["merges"])
    (folder / "tokenizer" / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    config = json.loads((folder / "tokenizer" / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {token.pop("id"): token for token in whole["added_tokens"]}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config))
    other = TextEncoder.from_folder(folder, CPU)
    assert other.num_prefix_tokens == 34 and other.tokenizer_id != encoder.tokenizer_id
    for prompt in PROMPTS:
        assert other._tokens(prompt) == encoder._tokens(prompt)


# ---- What it knows --------------------------------------------------------------------------------------------------


def test_both_languages_mean_the_same(encoder):
    """A name's nearest in the other language is its translation, seen by the mean or any one closing state."""
    table = load_emoji()
    states = [[encoder.encode(name) for name in (table[c].en, table[c].zh)] for c in small_list()]
    views = {"mean": lambda s: s.mean(0)} | {f"closing {i}": lambda s, i=i: s[-i] for i in range(1, 6)}
    for name, view in views.items():
        en, zh = (
            torch.nn.functional.normalize(torch.stack([view(pair[i]) for pair in states]), dim=-1) for i in (0, 1)
        )
        own, similarity = torch.arange(len(states)), en @ zh.T
        for nearest in (similarity.argmax(1), similarity.argmax(0)):
            assert (nearest == own).float().mean() >= 0.95, name


def test_the_recipe_encodes_as_in_use(encoder):
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(TINY / "text_encoder", dtype=torch.float32)
    captions = ["a dog face on the left and a red apple on the right, on a pink background", "狗脸", "dog face"]
    with torch.no_grad():
        encoded = tiny_text.encode(model, encoder.tokenizer, captions)
    for caption, states, length in zip(captions, encoded.states, encoded.lengths, strict=True):
        torch.testing.assert_close(states[:length], encoder.encode(caption), atol=1e-5, rtol=1e-5)


def test_the_recipe_is_reproducible(encoder):
    tokenizer = tiny_tokenizer.train_tokenizer()
    assert tokenizer.get_vocab() == encoder.tokenizer.get_vocab()
    first, second = (tiny_text.train_text_encoder(tokenizer, num_steps=2, batch=8).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


# ---- Bad folders ----------------------------------------------------------------------------------------------------


def test_loading_is_quiet_and_leaves_the_librarys_settings(capfd):
    before = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    TextEncoder.from_folder(TINY, CPU)
    assert (transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()) == before
    assert capfd.readouterr() == ("", "")


def test_a_missing_folder_file_or_weight_is_named(tmp_path):
    with pytest.raises(ValueError, match="no tokenizer/ in"):
        TextEncoder.from_folder(tmp_path, CPU)
    folder = copy_of(TINY, tmp_path / "tiny")
    weights = folder / "text_encoder" / "model.safetensors"
    tensors = load_file(weights)
    lost = next(name for name in tensors if name.endswith("layers.1.mlp.up_proj.weight"))
    save_file({name: t for name, t in tensors.items() if name != lost}, weights, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lacks 1 weights.*layers.1.mlp.up_proj.weight"):
        TextEncoder.from_folder(folder, CPU)
    weights.unlink()
    with pytest.raises(ValueError, match="text_encoder cannot be loaded"):
        TextEncoder.from_folder(folder, CPU)
    for file in (folder / "tokenizer").iterdir():
        file.unlink()
    with pytest.raises(ValueError, match="tokenizer holds no tokenizer"):
        TextEncoder.from_folder(folder, CPU)
