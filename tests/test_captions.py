"""Captions of every encoding and form."""

import json
import random

import pytest

from data.captions import (
    LANGUAGE_ROWS,
    LANGUAGES,
    Wording,
    clean,
    decode_text,
    language_of,
    language_row,
    parse_captions,
    parse_wordings,
)
from data.row import caption_member


@pytest.mark.parametrize(
    "text, encoding",
    [
        ("a café", "utf-8"),
        ("狗 dog 🐶", "utf-8-sig"),
        ("狗在跑", "utf-16"),
        ("狗在跑", "utf-32"),
        ("dog", "utf-16"),
        ("一只黑色的狗", "gb18030"),
        ("一只狗", "gbk"),
        ("红苹果", "gb2312"),
        ("㐀㐁 和 𠀀", "gb18030"),  # four bytes each
        ("a café", "cp1252"),
        ("狗", "gb18030"),
        ("a photo of 狗", "gb18030"),
        ("黑貓與紅蘋果在櫻樹下", "gb18030"),
        ("naïve Zürich, Müller’s señora", "cp1252"),
        ("“Élan” – 5 € …", "cp1252"),
        ("über", "cp1252"),
        ("собака", "utf-8"),
        ("👨‍👩‍👧‍👦 🏳️‍🌈", "utf-8"),
        ("𝔘𝔫𝔦 ∑ ꙮ", "utf-8"),
    ],
)
def test_encodings(text, encoding):
    assert decode_text(text.encode(encoding)) == text


@pytest.mark.parametrize("mark, encoding", [
    (b"\xfe\xff", "utf-16-be"), (b"\xff\xfe", "utf-16-le"),
    (b"\0\0\xfe\xff", "utf-32-be"), (b"\xff\xfe\0\0", "utf-32-le"),
])  # fmt: skip
def test_either_byte_order(mark, encoding):
    assert clean(decode_text(mark + "狗 dog 🐶".encode(encoding))) == "狗 dog 🐶"


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
        cleaned = clean(decode_text(rng.randbytes(rng.randrange(40))))
        cleaned.encode()
        assert clean(cleaned) == cleaned and language_of(cleaned) in LANGUAGES


@pytest.mark.parametrize(
    "text, expected",
    [
        ("cafe\u0301", "café"),  # composed
        ("\u1112\u1161\u11ab", "한"),
        ("Å", "Å"),  # the unit's sign is the letter
        ("红，蓝！ＡＢＣ", "红，蓝！ＡＢＣ"),  # full width stays
        ("ﬁve ½ ①", "ﬁve ½ ①"),
        ("a\r\nb\rc\u2028d\x85e\vf", "a\nb\nc\nd\ne\nf"),
        ("a\tb", "a\tb"),
        ("do\0g\x1b[31m \x7f\x9fred", "dog[31m red"),
        ("\ufeffdog\ufeff", "dog"),
        (" \u3000\xa0\u200b狗\u2003\n", "狗"),
        ("👨\u200d👩 می\u200cخواهم", "👨\u200d👩 می\u200cخواهم"),  # joiners carry meaning
        ("dog \ud83d", "dog \ufffd"),
        ("\0\x01 \u200b", ""),
    ],
)
def test_what_a_reader_sees(text, expected):
    assert clean(text) == expected


@pytest.mark.parametrize(
    "text, language",
    [
        ("狗", "zh"), ("a 狗", "zh"), ("穿 Nike 的人", "zh"), ("貓與蘋果", "zh"), ("𠀀", "zh"), ("3 只狗 🐶", "zh"),
        ("dog", "en"), ("un café à Zürich", "en"), ("a sign that says 茶", "en"), ("ＡＢＣ", "en"), ("it’s", "en"),
        ("犬が走っている", "other"), ("東京タワー", "other"), ("개가 달린다", "other"), ("собака", "other"),
        ("собака породы dog", "other"), ("كلب", "other"), ("χ", "other"), ("หมา", "other"),
        ("🐶 123", "none"), ("", "none"), ("…!?", "none"), ("\ufffd", "none"),
    ],
)  # fmt: skip
def test_language_by_script(text, language):
    assert language_of(text) == language


def test_a_text_without_letters_has_the_row_of_other_languages():
    assert [language_row(language) for language in LANGUAGES] == [0, 1, 2, 2]
    assert LANGUAGE_ROWS == ("zh", "en", "other")


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
        ("json", {"captions": None, "caption": "🐶"}, ({"none": ["🐶"]}, "")),
        ("json", {"caption": "\ufeff\u200b dog \0\n"}, ({"en": ["dog"]}, "")),
        ("json", {"caption": "dog " * 5000}, ({"en": [("dog " * 5000).strip()]}, "")),
        ("json", {"captions": {"text": "a dog", "weight": 3}}, ({"en": ["a dog"]}, "")),
        ("json", {"captions": {"en": [{"text": "a dog"}, {"text": "never", "weight": 0}]}}, ({"en": ["a dog"]}, "")),
        ("json", {"captions": [{"text": "chien", "language": "fr"}]}, ({"other": ["chien"]}, "")),
        ("json", {"caption": "dog", "category": "a\0\ud83d"}, ({"en": ["dog"]}, "a\ufffd")),
        ("txt", "  一只狗\n", ({"zh": ["一只狗"]}, "")),
        ("txt", "one\r\ntwo", ({"en": ["one\ntwo"]}, "")),
        ("txt", '{"caption": "a dog"}', ({"en": ['{"caption": "a dog"}']}, "")),
    ],
)  # fmt: skip
def test_forms(extension, content, expected):
    if extension == "json":
        content = json.dumps(content, ensure_ascii="\\ud83d" in json.dumps(content))
    assert parse_captions(extension, content.encode()) == expected


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32", "gb18030"])
def test_json_in_other_encodings(encoding):
    content = json.dumps({"captions": {"en": "a dog", "zh": "一只黑色的狗"}}, ensure_ascii=False).encode(encoding)
    assert parse_captions("json", content) == ({"en": ["a dog"], "zh": ["一只黑色的狗"]}, "")


def test_weights_stay_with_their_texts():
    content = {"captions": [{"text": "狗", "weight": 0.5}, "a dog", {"text": "dog", "weight": 3, "language": "en-GB"}]}
    wordings, _ = parse_wordings("json", json.dumps(content).encode())
    assert wordings == [Wording("a dog", "en"), Wording("dog", "en", 3.0), Wording("狗", "zh", 0.5)]


@pytest.mark.parametrize("weight", ["-1", "NaN", "Infinity", '"2"', "null", "true", "[1]"])
def test_a_weight_that_is_none_is_a_clear_error(weight):
    with pytest.raises(ValueError, match="weight must be a number of at least 0, got"):
        parse_captions("json", b'{"captions": [{"text": "dog", "weight": %s}]}' % weight.encode())


def test_half_a_character_in_a_row_leaves_the_rest_as_it_is():
    caption = caption_member([("en", 'caf\xe9 "a"'), ("zh", "茶\ud83d")])
    assert parse_captions(*caption)[0] == {"en": ['caf\xe9 "a"'], "zh": ["茶\ufffd"]}
    assert parse_captions(*caption_member([(None, "Make it \ud800 red")]))[0] == {"en": ["Make it \ufffd red"]}


def test_half_a_character_is_replaced():
    captions, _ = parse_captions("json", b'{"caption": "dog \\ud83d"}')
    assert captions == {"en": ["dog \ufffd"]}


@pytest.mark.parametrize(
    "data",
    [
        b"{", b"[]", b"{}", b"\xff\x00", b"[" * 100_000, b'{"caption": ""}', b'{"caption": null}', b'{"caption": 7}',
        b'{"captions": {"en": [" "]}}', b'{"captions": {"en": ["\\u200b"]}}', b'{"captions": [{"text": 7}]}',
        b'{"captions": [{"text": "dog", "weight": 0}]}', b'{"caption": "\\u0000\\u0001"}',
    ],
)  # fmt: skip
def test_nothing_usable_is_a_clear_error(data):
    with pytest.raises(ValueError):
        parse_captions("json", data)
