"""Captions of every encoding and form."""

import json

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
    ],
)
def test_encodings(text, encoding):
    assert decode_text(text.encode(encoding)) == text


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
        ("txt", "  一只狗\n", ({"zh": ["一只狗"]}, "")),
    ],
)  # fmt: skip
def test_forms(extension, content, expected):
    data = json.dumps(content, ensure_ascii=False) if extension == "json" else content
    assert parse_captions(extension, data.encode()) == expected


@pytest.mark.parametrize("data", [b"{", b"[]", b"{}", b'{"caption": ""}', b'{"captions": {"en": [" "]}}'])
def test_nothing_usable_is_a_clear_error(data):
    with pytest.raises(ValueError):
        parse_captions("json", data)
