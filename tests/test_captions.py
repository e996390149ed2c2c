"""Captions of every encoding and form."""

import json
import random

import pytest

from data.captions import decode_text, language_of, parse_captions


@pytest.mark.parametrize(
    "text, encoding",
    [
        ("a café", "utf-8"),
        ("狗 dog 🐶", "utf-8-sig"),
        ("狗在跑", "utf-16"),
        ("一只黑色的狗", "gb18030"),
        ("a café", "cp1252"),
        ("狗", "gb18030"),
        ("a photo of 狗", "gb18030"),
        ("黑貓與紅蘋果在櫻樹下", "gb18030"),
        ("naïve Zürich, Müller’s señora", "cp1252"),
        ("über", "cp1252"),
    ],
)
def test_encodings(text, encoding):
    assert decode_text(text.encode(encoding)) == text


@pytest.mark.parametrize(
    "data, expected",
    [
        ("一只".encode() + b"\xff" + "黑色的狗".encode(), "一只\ufffd黑色的狗"),
        ("它说 “你好”".encode()[:-1], "它说 “你好\ufffd"),
        (b"\xff\xfe\x41", "\ufffd"),
        (b"", ""),
    ],
)
def test_damage_stays_where_it_is(data, expected):
    assert decode_text(data) == expected


def test_any_bytes_decode():
    rng = random.Random(0)
    for _ in range(500):
        decode_text(rng.randbytes(rng.randrange(40)))


@pytest.mark.parametrize(
    "text, language", [("狗", "zh"), ("a 狗", "zh"), ("dog", "en"), ("🐶 123", "other"), ("", "other")]
)
def test_language_by_script(text, language):
    assert language_of(text) == language


@pytest.mark.parametrize(
    "extension, content, expected",
    [
        (
            "json", {"captions": {"zh": "狗", "en": ["dog", "a dog "]}, "category": "pets"},
            ({"en": ["dog", "a dog"], "zh": ["狗"]}, "pets"),
        ),
        ("json", {"caption": "a dog"}, ({"en": ["a dog"]}, "")),
        ("json", {"captions": ["a dog", "一只狗"]}, ({"en": ["a dog"], "zh": ["一只狗"]}, "")),
        ("json", {"caption": ["a dog", "一只狗"]}, ({"en": ["a dog"], "zh": ["一只狗"]}, "")),
        ("json", {"captions": {"zh-CN": "狗", "zh_Hant": ["貓"], "EN": "a"}}, ({"en": ["a"], "zh": ["狗", "貓"]}, "")),
        ("json", {"captions": {"fr": "un chien", "ja": "いぬ"}}, ({"other": ["un chien", "いぬ"]}, "")),
        ("json", {"captions": {"en": None, "zh": ["狗", 3, ""]}, "category": None}, ({"zh": ["狗"]}, "")),
        ("json", {"captions": None, "caption": "🐶"}, ({"other": ["🐶"]}, "")),
        ("json", {"caption": "\ufeff\u200b dog \0\n"}, ({"en": ["dog"]}, "")),
        ("json", {"caption": "dog " * 5000}, ({"en": [("dog " * 5000).strip()]}, "")),
        ("txt", "  一只狗\n", ({"zh": ["一只狗"]}, "")),
    ],
)  # fmt: skip
def test_forms(extension, content, expected):
    data = json.dumps(content, ensure_ascii=False) if extension == "json" else content
    assert parse_captions(extension, data.encode()) == expected


def test_half_a_character_is_replaced():
    captions, _ = parse_captions("json", b'{"caption": "dog \\ud83d"}')
    assert captions == {"en": ["dog \ufffd"]}


@pytest.mark.parametrize(
    "data",
    [
        b"{", b"[]", b"{}", b"\xff\x00", b"[" * 100_000, b'{"caption": ""}', b'{"caption": null}', b'{"caption": 7}',
        b'{"captions": {"en": [" "]}}', b'{"captions": {"en": ["\\u200b"]}}',
    ],
)  # fmt: skip
def test_nothing_usable_is_a_clear_error(data):
    with pytest.raises(ValueError):
        parse_captions("json", data)
