"""Refused words: found in every disguise that is promised, never in a word that only looks like one, never shown."""

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from data.word_filter import RefusedInstructionError, WordFilter

ENGLISH = ["ass", "hell", "god", "sex", "shit", "anus", "penis", "cigarette", "naked woman", "Straße", "top-less", "69"]
CHINESE = ["香烟", "赌博", "法轮功", "AV女优", "裸体"]


@pytest.fixture(scope="module")
def words():
    return WordFilter(ENGLISH + CHINESE)


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        # As it is, in any case, width and dress
        ("add a cigarette", "c***"),
        ("CIGARETTE!", "c***"),
        ("Ｃｉｇａｒｅｔｔｅ", "c***"),
        ("ⓒⓘⓖⓐⓡⓔⓣⓣⓔ", "c***"),
        ("𝐜𝐢𝐠𝐚𝐫𝐞𝐭𝐭𝐞", "c***"),
        ("cígàrëtte", "c***"),
        ("s̶e̶x̶", "s***"),
        ("STRASSE", "s***"),
        ("a (cigarette).", "c***"),
        ("cigarette-shaped", "c***"),
        ("the_cigarette_on_the_left", "c***"),
        ("the cigarette's smoke", "c***"),
        ("给他加一支cigarette吧", "c***"),
        ("draw 69 on it", "6***"),
        ("my ass", "a***"),
        # Characters of no width
        ("cig\u200barette", "c***"),
        ("ci\u00adga\u2060re\ufefftte", "c***"),
        ("s\u200de\u200dx", "s***"),
        ("s\u3164ex", "s***"),
        # Repeated letters
        ("cigareeeette", "c***"),
        ("ciiiigarette", "c***"),
        ("shiiiit", "s***"),
        ("sshhiitt", "s***"),
        ("asssss", "a***"),
        ("SEEEEX", "s***"),
        # Spaces and punctuation between characters
        ("s e x", "s***"),
        ("add s e x to it", "s***"),
        ("a s h i t", "s***"),
        ("c i g a r e t t e", "c***"),
        ("c.i.g.a.r.e.t.t.e", "c***"),
        ("c. i. g. a. r. e. t. t. e.", "c***"),
        ("c-i-g-a-r-e-t-t-e", "c***"),
        ("cig*arette", "c***"),
        ("cig_arette", "c***"),
        ("ciga\u2022rette", "c***"),
        ("s'e'x", "s***"),
        ("s ex", "s***"),
        ("sh it", "s***"),
        ("sh/it", "s***"),
        ("he/ll", "h***"),
        ("s   h   i   t", "s***"),
        ("s*h*i*i*i*t", "s***"),
        ("cigar🌟ette", "c***"),
        # Phrases
        ("a Naked  Woman", "n***"),
        ("naked-woman", "n***"),
        ("nakedwoman", "n***"),
        ("n a k e d w o m a n", "n***"),
        ("topless", "t***"),
        ("top less", "t***"),
        ("top-less", "t***"),
        # Chinese
        ("给他加上香烟", "香***"),
        ("香 烟", "香***"),
        ("香\u3000烟", "香***"),
        ("香\u200b烟", "香***"),
        ("香.烟", "香***"),
        ("香*烟", "香***"),
        ("香-_-烟", "香***"),
        ("香·烟", "香***"),
        ("香🌟烟", "香***"),
        ("法，轮，功", "法***"),
        ("法、轮。功", "法***"),
        ("法轮\n功", None),
        ("ＡＶ女优", "a***"),
        ("把她变成av女優", None),  # another character: to be listed too
        ("av 女 优", "a***"),
        ("一个裸体的人", "裸***"),
    ],
)
def test_what_is_found(words, text, masked):
    assert words.matches(text) == ([masked] if masked else [])


@pytest.mark.parametrize(
    "text",
    [
        # Inside other words
        "a glass of water in the class",
        "an assassin with a massive brass compass passed the embassy",
        "a shell on the beach, hello",
        "Scunthorpe, Sussex, Essex, Middlesex; a sexton",
        "cigarettes",
        "the size is 690 by 1969",
        "a goddess and a goddamn demigod",
        # Spelled like them but for a doubled letter
        "a good dog",
        "heel",
        "as is",
        # Contractions and possessives
        "he'll be fine and she’ll too",
        "we'll shell it",
        "Jess's dress",
        # Words that meet by chance
        "the pen is red",
        "show an us flag",
        "an us-style diner",
        "The pen.Is it red?",
        "pen/is",
        "(an) (us)",
        "make the hat as sharp as this",
        "6.9 and 6,9 and 6 9",
        "as such, it is a he; ll is not",
        "a naked tree. Woman on the left",
        "naked, woman",
        "Naked\nwoman",
        "a naked old woman",
        # Spelled out, but other words
        "the letters H E L L O",
        "S H E L L",
        "c-l-a-s-s",
        "G O O D",
        "grades: A, B, C, D",
        "axis x, y, z",
        "s e x t a n t",
        "size S / M / L",
        # Chinese: other words, and sentences that meet
        "闻起来很香，烟花也很美",
        "很香。烟雾",
        "很香！烟花",
        "很香\n烟花",
        "香水和烟花",
        "赌气的博士",
        "USAV女优",
        "法国的车轮成功了",
        "",
        " \n\t",
        "🙂🙂",
        "12345",
    ],
)
def test_what_is_not_refused(words, text):
    assert words.matches(text) == []
    words.check(text)


@pytest.mark.parametrize(
    ("word", "found", "not_found"),
    [
        # Words of other scripts that meet by chance, and the same words in disguise
        ("народ", ["Народ", "н а р о д", "на*род", "народдд", "нар о д"], ["выйти на род", "на род", "народы"]),
        ("слон", ["слон", "с-л-о-н", "с л о н"], ["с лон", "и слоны"]),
        ("λόγος", ["λόγος", "λ ό γ ο ς"], ["λό γος"]),
        ("كلب", ["كلب", "كَلْب", "ك ل ب"], ["كل بيت", "كلبي"]),
        ("ولدان", ["ولدان"], ["ول دان", "و لدان"]),
        ("שלום", ["שלום", "שָׁלוֹם"], ["של ום"]),
        ("भालू", ["एक भालू है"], ["भोले", "भल", "भाला", "भा लू"]),
        ("कुत्ता", ["कुत्ता", "लाल कुत्ता।"], ["कत", "कूत"]),
        # Symbols that belong to the word
        ("C++", ["learn C++", "c++.", "(C++)", "C++11"], ["vitamin C", "plan c", "c + +", "abc++"]),
        ("C#", ["C# code"], ["c", "c major"]),
        ("#metoo", ["say #MeToo", "#metoo."], ["me too", "metoo", "#metoos"]),
        ("$$$", ["give me $$$"], ["$", "$ $ $"]),
        ("🔞", ["a 🔞 sign"], ["18"]),
        # Punctuation that does not
        ("«cigarette»", ["«cigarette»"], []),
        ('"cigarette",', ["a cigarette"], ["cigar"]),
        ("- 香烟；", ["香烟", "香.烟"], ["香"]),
        ("AK-47", ["ak-47", "AK47", "ak 47"], ["a 47"]),
        # Letters of other scripts among Latin ones, and Latin ones in other shapes; a Russian word stays one
        ("cop", ["\u0441op", "c\u043ep", "co\u03c1", "ᴄᴏᴘ", "🅲🅾🅿"], ["\u0441\u043e\u0440", "\u0441\u043e\u0440 co"]),
        ("kill", ["k\u0131ll", "\u043aill", "k\u0456\u04cfl"], ["\u043a\u0438ll"]),
    ],
)  # fmt: skip
def test_other_scripts_and_symbols(word, found, not_found):
    words = WordFilter([word])
    assert [text for text in found if not words.matches(text)] == []
    assert [text for text in not_found if words.matches(text)] == []


@pytest.mark.parametrize("word", [".", "...", "。", "、 ，", "- -", '""', "—"])
def test_punctuation_alone_is_no_word(tmp_path, word):
    with pytest.raises(ValueError, match="punctuation"):
        WordFilter([word])
    (tmp_path / "list.txt").write_text(f"dog\n{word}\n", "utf-8")
    with pytest.raises(ValueError, match="list.txt, line 2: it is punctuation"):
        WordFilter.from_file(tmp_path / "list.txt")


def test_a_refusal_names_what_is_wrong_but_never_in_full():
    for word in [*ENGLISH, *CHINESE, "x", "草", "🔞"]:
        words = WordFilter([word])
        text = f"please, {word} 42"
        with pytest.raises(RefusedInstructionError) as refusal:
            words.check(text)
        message = str(refusal.value)
        assert isinstance(refusal.value, ValueError) and words.num_refused == 1
        assert word.casefold() not in message.replace("the instruction has 1 of the refused words", "").replace(
            "; say it without", ""
        )
        assert "please, " not in message and "42" not in message
    assert WordFilter(["cigarette"]).matches("cigarette Cigarette c i g a r e t t e") == ["c***"]
    assert WordFilter(["cigarette", "cigar"]).matches("a cigar, a cigarette") == ["c***", "c***"]
    assert WordFilter(["🔞"]).matches("a 🔞\ufe0f sign") == ["a symbol"]


def test_refusals_are_counted():
    words = WordFilter(["cigarette"])

    def refused(n):
        try:
            words.check("a cigarette" if n % 3 == 0 else "a dog")
        except RefusedInstructionError:
            return 1
        return 0

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(refused, range(3000))) == words.num_refused == 1000


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "gb18030"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_a_list_is_read_in_any_encoding(tmp_path, encoding, line_end):
    path = tmp_path / "words.txt"
    lines = [
        "# 不允许的内容",
        "香烟  # 烟草",
        "",
        "  赌博  ",
        "naked woman",
        "c#minor",
        "#hidden",
        "这是一个很长的中文词语",
    ]
    path.write_bytes(line_end.join(lines).encode(encoding))
    words = WordFilter.from_file(path)
    found = ["香烟", "赌博", "a naked woman", "c#minor", "这是一个很长的中文词语"]
    assert [len(words.matches(text)) for text in found] == [1] * 5
    assert words.matches("hidden 烟草 不允许的内容") == []


def test_bad_lists_are_named(tmp_path):
    with pytest.raises(ValueError, match="none.txt cannot be read: No such file"):
        WordFilter.from_file(tmp_path / "none.txt")
    (tmp_path / "empty.txt").write_text("# nothing\n\n")
    with pytest.raises(ValueError, match="empty.txt has no word"):
        WordFilter.from_file(str(tmp_path / "empty.txt"))
    (tmp_path / "unseen.txt").write_text("dog\n\u200b\u2060\n", "utf-8")
    with pytest.raises(ValueError, match="unseen.txt, line 2: nothing"):
        WordFilter.from_file(tmp_path / "unseen.txt")
    with pytest.raises(ValueError, match="nothing to be seen"):
        WordFilter(["\u200b"])
    assert WordFilter(["香香", "香香香香香"]).matches("香") == []
    assert WordFilter([]).matches("anything, 香烟") == []


@pytest.mark.parametrize("text", ["s e x t ", "a b ", "香烟，", "香 ", "aaaaaaaa", "f*", "x", "as s", "he'll "])
def test_time_is_linear_in_the_text(text):
    words = WordFilter(ENGLISH + CHINESE + [f"word{n}" for n in range(1000)] + ["香" * n for n in range(20, 24)])

    def seconds(times):
        whole, best = text * times, float("inf")
        for _ in range(3):
            started = time.process_time()
            words.matches(whole)
            best = min(best, time.process_time() - started)
        return best

    seconds(10)
    assert seconds(16000) < 16 * 4 * max(seconds(1000), 1e-3)  # 16 times as long: a square would be 256


def test_every_word_is_found_in_every_simple_disguise():
    """Words of random letters, and every disguise of the class docstring, at random."""
    rng = random.Random(4)
    consonants, vowels = "bcdfgklmnprst", "aeiou"
    for _ in range(400):
        word = "".join(rng.choice(consonants) + rng.choice(vowels) for _ in range(rng.randint(2, 4))) + "x"
        words = WordFilter([word])
        at = rng.randrange(1, len(word))
        stretched = rng.randrange(len(word))
        for disguise in (
            word.upper(),
            "".join(chr(ord(char) + 0xFEE0) for char in word),
            rng.choice(" .-*_|/~").join(word),
            rng.choice(["\u200b", "\u200d", "\u2060", "\u00ad"]).join(word),
            word[:at] + rng.choice("*_-~|+^") + word[at:],
            word[:stretched] + word[stretched] * rng.randint(2, 9) + word[stretched:],
            "".join(char * 2 for char in word),
            word[0] + " " + word[1:],
            word[:-1] + " " + word[-1],
        ):
            assert words.matches(f"please show {disguise} there") == [f"{word[0]}***"], disguise
            assert words.matches(f"please show un{word}ly there") == []
