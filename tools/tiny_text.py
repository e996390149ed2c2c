"""Recipe of the tiny tokenizer and text encoder: a Qwen2.5-VL of about a million parameters that knows the emoji.

It stands in for a pretrained language model, so it may see every name.  A symmetric contrastive loss (InfoNCE, arXiv
1807.03748) pulls the English and Chinese captions of one thing together and all others apart, once on the mean of the
states that the MMDiT will see and once on the last one; a small next-token loss keeps the states of single tokens
informative.

Called by `python -m tools.make_tiny`.
"""

import json
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from data.emoji_captions import COLOURS, PLACES, emoji_captions, scene_captions
from data.emoji_table import load_emoji
from model.templates import EDIT_PREFIX, SUFFIX, TEXT_TO_IMAGE_PREFIX
from model.text_encoder import quiet_transformers

VOCABULARY = 4608
WIDTH = 128  # joint_attention_dim of the tiny transformer
# Qwen2.5-VL's special tokens, in the order of their released ids.
SPECIAL_TOKENS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _scene(rng: random.Random, names: list[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the captions of a random scene of one to three things."""
    places = rng.choice([["left", "right"], ["top", "bottom"], ["centre"], ["left", "centre", "right"]])
    return scene_captions([(*rng.choice(names), place) for place in places], rng.choice(list(COLOURS)))


def train_tokenizer() -> Qwen2Tokenizer:
    """Train a byte-level BPE with Qwen2's pre-tokenisation on the captions and templates."""
    names = [(e.en, e.zh) for e in load_emoji().values()]
    rng = random.Random(0)
    corpus = [text for en, zh in names for texts in emoji_captions(en, zh).values() for text in texts]
    corpus += [text for _ in range(6000) for texts in _scene(rng, names).values() for text in texts]
    # Often enough that each word of the templates is one token, as in the released tokenizer.
    templates = "\n".join((TEXT_TO_IMAGE_PREFIX, EDIT_PREFIX, SUFFIX, "Picture 1: Picture 2: Picture 3: "))
    for token in SPECIAL_TOKENS:
        templates = templates.replace(token, "\n")
    corpus += [templates] * 3000
    corpus += [
        " ".join([*COLOURS, *PLACES]),
        "0 1 2 3 4 5 6 7 8 9 . , : ; ! ? ( ) [ ] { } \" ' - _ / + = * & % $ # @",
    ] * 200

    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL_TOKENS), initial_alphabet=sorted(alphabet), show_progress=False
    )
    bpe.train_from_iterator(corpus, trainer)
    model = json.loads(bpe.to_str())["model"]
    merges = [tuple(m) if not isinstance(m, str) else tuple(m.split(" ")) for m in model["merges"]]
    tokenizer = Qwen2Tokenizer(
        vocab=model["vocab"], merges=merges, additional_special_tokens=SPECIAL_TOKENS[1:], model_max_length=131072
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    """Build the tiny Qwen2.5-VL with random weights; its vision tower is small but whole."""
    names = ("im_end", "endoftext", "vision_start", "vision_end", "image_pad", "video_pad")
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in names}
    config = Qwen2_5_VLConfig(
        text_config=dict(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32768, rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": [4, 6, 6]},
            bos_token_id=ids["endoftext"], eos_token_id=ids["im_end"], tie_word_embeddings=True,
        ),
        vision_config=dict(
            depth=2, hidden_size=64, intermediate_size=128, num_heads=2, patch_size=14, spatial_merge_size=2,
            temporal_patch_size=2, window_size=112, out_hidden_size=WIDTH, fullatt_block_indexes=[1],
        ),
        image_token_id=ids["image_pad"], video_token_id=ids["video_pad"],
        vision_start_token_id=ids["vision_start"], vision_end_token_id=ids["vision_end"], tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen2_5_VLForConditionalGeneration(config)


def _states(model, tokenizer, captions: list[str], num_prefix: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ids, last hidden states, the mask of what is kept after the prefix, and each row's last position.

    Padding stands on the right of a causal model, so it changes no state before it.
    """
    rows = [tokenizer(TEXT_TO_IMAGE_PREFIX + caption + SUFFIX)["input_ids"] for caption in captions]
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    places = torch.arange(ids.shape[1])
    states = model.model.language_model(input_ids=ids, use_cache=False).last_hidden_state
    return ids, states, (places >= num_prefix) & (places < lengths[:, None]), lengths - 1


def _pooled(states: Tensor, mask: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Return the unit-norm mean and last states, (rows, WIDTH) each."""
    mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    return F.normalize(mean, dim=-1), F.normalize(states[torch.arange(len(last)), last], dim=-1)


def train_text_encoder(
    tokenizer: Qwen2Tokenizer, num_steps: int = 500, batch: int = 192, seed: int = 0
) -> Qwen2_5_VLForConditionalGeneration:
    """Train the tiny text encoder on the CPU, a few minutes."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    model = build_model(tokenizer)
    emoji = list(load_emoji().values())
    names = [(e.en, e.zh) for e in emoji]
    plain = [e for e in emoji if "skin tone" not in e.en]
    num_prefix = len(tokenizer(TEXT_TO_IMAGE_PREFIX)["input_ids"])
    trained = [p for n, p in model.named_parameters() if "visual" not in n]
    optimizer = torch.optim.AdamW(trained, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, num_steps, pct_start=0.1)
    start = time.time()
    for step in range(num_steps):
        things = rng.sample(plain, batch // 2) + rng.sample(emoji, batch // 4)
        pairs = [emoji_captions(e.en, e.zh) for e in things]
        pairs += [_scene(rng, names) for _ in range(batch - len(pairs))]
        captions = [rng.choice(pair["en"]) for pair in pairs] + [rng.choice(pair["zh"]) for pair in pairs]
        ids, states, mask, last = _states(model, tokenizer, captions, num_prefix)
        # One thing can be drawn twice; its captions are no negatives of each other.
        same = torch.tensor([[a["en"][0] == b["en"][0] for b in pairs] for a in pairs]) & ~torch.eye(batch).bool()
        contrast = 0.0
        for pooled in _pooled(states, mask, last):
            logits = (pooled[:batch] @ pooled[batch:].T / 0.05).masked_fill(same, -1e4)
            target = torch.arange(batch)
            contrast = contrast + F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)
        content = mask[:, 1:]
        language = F.cross_entropy(model.lm_head(states[:, :-1][content]), ids[:, 1:][content])
        loss = contrast / 4 + 0.1 * language
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == num_steps - 1:
            print(
                f"text step {step}/{num_steps} contrast {contrast.item() / 4:.3f} next token {language.item():.3f} "
                f"{time.time() - start:.0f} s",
                flush=True,
            )
    return model.eval().requires_grad_(False)


@torch.no_grad()
def retrieval(model, tokenizer, names: list[tuple[str, str]]) -> dict[str, float]:
    """Return how often a name's nearest name in the other language is its own translation, by mean states."""
    num_prefix = len(tokenizer(TEXT_TO_IMAGE_PREFIX)["input_ids"])
    pooled = []
    for texts in zip(*names, strict=True):
        chunks = [list(texts[i : i + 256]) for i in range(0, len(texts), 256)]
        pooled.append(torch.cat([_pooled(*_states(model, tokenizer, c, num_prefix)[1:])[0] for c in chunks]))
    similarity = pooled[0] @ pooled[1].T
    target = torch.arange(len(names))
    return {
        "en_to_zh": (similarity.argmax(1) == target).float().mean().item(),
        "zh_to_en": (similarity.argmax(0) == target).float().mean().item(),
    }


def save_text(model: Qwen2_5_VLForConditionalGeneration, tokenizer: Qwen2Tokenizer, folder: Path) -> None:
    """Write `text_encoder/` (bfloat16) and `tokenizer/` of a released folder."""
    with quiet_transformers():
        model.to(torch.bfloat16).save_pretrained(folder / "text_encoder")
    tokenizer.save_pretrained(folder / "tokenizer")
