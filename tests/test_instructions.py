"""Loose wordings: every rule's own examples, what must never change, and the checks of the rules' files."""

import random
import re
import time
import tomllib

import pytest

from data import instruction_rules
from data.instruction_rules import CATEGORIES, LANGUAGES, load_rules, rule_book
from data.instructions import Normalized, choose_wording, normalize

EXAMPLES = [
    (language, rule.name, loose, canonical)
    for language in LANGUAGES
    for rule in rule_book(language).rules
    for loose, canonical in rule.examples
]


@pytest.mark.parametrize(("language", "name", "loose", "canonical"), EXAMPLES)
def test_examples_of_the_rules(language, name, loose, canonical):
    assert normalize(loose, language) == Normalized(canonical, name, loose)
    assert normalize(loose).text == canonical  # the language is found
    assert normalize(canonical, language).text == canonical
    assert normalize(canonical, language).rule is not None  # a canonical wording is known as one
    for disguise in (f"  {loose}\n", loose.rstrip(".。!！?？") + ("!" if language == "en" else "！")):
        assert normalize(disguise, language).text == canonical
    polite = {"en": ["please {}", "Could you please {}", "{}, thanks"], "zh": ["请{}", "麻烦帮我{}", "{}，谢谢"]}[
        language
    ]
    for frame in polite:
        assert normalize(frame.format(loose.rstrip(".。!！?？")), language).text == canonical


def test_there_are_rules_for_every_category_in_both_languages():
    for language in LANGUAGES:
        book = rule_book(language)
        assert len(book.rules) >= 40 and {rule.category for rule in book.rules} == set(CATEGORIES)
        assert sum(len(rule.examples) for rule in book.rules) >= 100


UNCHANGED = """
Don't remove the dog.
don't change the colour
never make it red
Remove the dog and make the cat red.
make the dog red and the cat blue
turn the car red and remove the dog
Keep the background, change the sky to blue
remove everything except the dog
make only the hat red
What is this?
a photo of a red car
Change the skin tone from light to dark.
Dress this woman as an artist.
Give this man red hair.
Change the red hair to curly hair.
Remove the hair, make this woman bald.
Make the woman shrug.
Set the clock to 10:30.
Change the moon phase to a new moon.
Change the city scene to night.
Change the expression to "happy face".
make the sky more blue
paint it black and white
turn off the light
make the wall half red
make the orange light green
paint the woman in red light green
make the background a bit darker
change the sky to a bit darker blue
the background should be blurred
the dog should be a bit bigger
shift the colour to red
give me a red car
give it a try
I don't want the dog removed
I don't want the dog to be moved
I don't want the dog red
I don't like the way the dog looks
turn the volume up
I don't want you to change anything
the dog
no change
不要去掉狗
不要改变背景
别改颜色
去掉狗并把猫变成红色
把猫变成红色把狗变成蓝色
保持背景不变，把天空变成红色
把这张图里的矿泉水瓶换成玻璃水杯，并在右下角加上'限时折扣'四个字
去掉头发，变成光头。
把这个女人打扮成画家。
让她耸肩。
把箭头转向左上方。
把时钟调到三点整。
把书翻开
画面太暗了
加油
去北京
让天空更蓝
改一下
给女孩换上红色的裙子
删除键要红色
把什么都变成红色
让她换上裙子
给她换成裙子
不要了
把眼镜摘掉放在桌上
把猫换成狗的位置
苹果怎么变成红色
苹果变成红色了吗
把苹果变成红色再删除香蕉
苹果变红香蕉变黄
红苹果
红苹果和绿苹果
除了狗都去掉
""".strip().splitlines()


@pytest.mark.parametrize(
    "instruction", [*UNCHANGED, "", "  ", "🙂", "123", "кошка красная", "「", 'write "SALE', "写上“折扣"]
)
def test_what_no_rule_fits_stays(instruction):
    assert normalize(instruction) == Normalized(instruction, None, instruction)


@pytest.mark.parametrize(
    ("instruction", "subject", "text"),
    [
        ("make it red", "the apple", "Change the colour of the apple to red."),
        ("red", "the apple", "Change the colour of the apple to red."),
        ("change the color", "apple 3", "Change the colour of apple 3."),
        ("make the dog red", "the apple", "Change the colour of the dog to red."),
        ("turn it into a cat", "the dog", "Turn the dog into a cat."),
        ("make the 2 dogs red", "apple 3", "Change the colour of the 2 dogs to red."),
        ("改一下颜色", "苹果", "请改变苹果的颜色。"),
        ("换红", "苹果", "请将苹果改为红色。"),
        ("把它变成红色", "第3个苹果", "请将第3个苹果改为红色。"),
        ("把狗变成红色", "苹果", "请将狗改为红色。"),
        ("换成一只猫", "狗", "请将狗替换为一只猫。"),
    ],
)
def test_a_known_subject_is_named_where_the_instruction_names_none(instruction, subject, text):
    assert normalize(instruction, subject=subject).text == text
    assert normalize(text, subject=subject).text == text


QUOTED = [
    "限时折扣",
    "make it red",
    "去掉 背景！",
    "  50% off,  2 for 1 ",
    "Don’t touch",
    "a “b” c",
    "remove, and; add.",
    "。",
]


@pytest.mark.parametrize("quoted", QUOTED)
@pytest.mark.parametrize("marks", ['""', "“”", "「」", "『』", "''", "‘’"])
def test_quoted_text_survives_character_by_character(quoted, marks):
    if marks[1] in quoted or marks[0] in quoted or (marks == "‘’" and "’" in quoted):
        quoted = "plain"
    text = marks[0] + quoted + marks[1]
    changed = 0
    for frame in (
        "write {} in the corner", "put the words {} at the top", "erase {}", "make the sign say {}", "change {} to {}",
        "在右下角加上{}四个字", "去掉{}", "把招牌上的字换成{}", "写上{}吧", "把{}改成{}", "把表情改成{}", "把狗换成{}",
    ):  # fmt: skip
        instruction = frame.format(text, text) if frame.count("{}") == 2 else frame.format(text)
        for language in LANGUAGES:
            normalized = normalize(instruction, language)
            assert normalized.text.count(text) == frame.count("{}") and normalized.original == instruction
            changed += normalized.rule is not None
    assert changed >= 12


@pytest.mark.parametrize(
    "name", ["Anna", "McDonald's", "iPhone 15", "C-3PO", "小明", "第12号车", "X Æ A-12", "二郎神", "red panda"]
)
def test_names_and_numbers_survive(name):
    frames = (
        "make {} red", "get rid of {}", "swap {} for a dog", "turn {} into a dog", "put {} on the left",
        "give {} a hat",
        "change {}'s colour", "replace the dog by {}", "add {}", "set the background to {}", "the car should be {}",
        "把{}变成红色", "去掉{}", "把{}换成狗", "把狗换成{}", "给{}戴上帽子", "在右边加上{}", "背景换成{}",
        "把{}移到左边", "换成{}",
    )  # fmt: skip
    changed = 0
    for frame in frames:
        for language in LANGUAGES:
            normalized = normalize(frame.format(name), language)
            assert name in normalized.text, normalized
            assert normalize(normalized.text, language).text == normalized.text
            changed += normalized.rule is not None
    assert changed >= 12


def test_whatever_is_said_a_second_time_changes_nothing():
    """Pieces of the rules' examples at random, in new combinations."""
    rng = random.Random(3)
    for language, joint in (("en", " "), ("zh", "")):
        loose = [text for spoken, _, *both in EXAMPLES if spoken == language for text in both]
        pieces = [text.split(" ") if joint else re.findall(r"\w{1,3}|\W", text) for text in loose]
        fitted = 0
        for _ in range(3000):
            first, second = rng.sample(pieces, 2)
            words = first[: rng.randint(1, len(first))] + second[rng.randrange(len(second)) :]
            instruction = joint.join(words)
            once = normalize(instruction, language)
            twice = normalize(once.text, language)
            assert twice.text == once.text, instruction
            fitted += once.rule is not None
            assert sorted(re.findall(r"\d+", instruction)) == sorted(re.findall(r"\d+", once.text)), instruction
            if once.rule is None:
                assert once.text == instruction
        assert fitted > 500


def test_the_wording_is_chosen_by_the_draw():
    assert choose_wording("make it red", 0.5, 0.49) == "Change the colour of it to red."
    assert choose_wording("make it red", 0.5, 0.5) == "make it red"
    assert choose_wording("make it red", 0.0, 0.0) == "make it red"
    assert choose_wording("换红", 1.0, 0.999) == "请将它改为红色。"
    assert choose_wording("What is this?", 1.0, 0.0) == "What is this?"
    for probability in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="--normalize is a probability"):
            choose_wording("make it red", probability, 0.5)


def test_long_instructions_cost_little():
    worst = ["make " + "the red " * 35, "a " * 150, "swap " + "a and " * 45, "把" * 290, "把红色的" * 70, '"' * 300,
             "put 'a " * 40, "in the " * 42, "change the colour of " + "a" * 270, "x" * 100_000,
             "把猫换成" + "猫" * 290]  # fmt: skip
    started = time.process_time()
    for instruction in worst:
        for language in LANGUAGES:
            normalize(instruction, language)
    assert time.process_time() - started < 5


# ---- The files ------------------------------------------------------------------------------------------------------

FILE = """
before = '''^please\\s+'''
after = '''[.]$'''
end = "."
space = '\\s+'
pronoun = "it"
pronouns = "it"
never = '[,]'
never_alone = 'and'
spelling = {}
[words]
colour = "red|blue"
[[rules]]
name = "paint"
category = "recolor"
pattern = "paint <X> <Y:colour>"
template = "Paint {X} {Y}."
examples = [["paint it red", "Paint it red."]]
"""


def test_a_file_of_rules_is_read(tmp_path):
    path = tmp_path / "rules.toml"
    path.write_text(FILE, "utf-8")
    rule = load_rules(path).rules[0]
    assert rule.fill(rule.match("paint the  car\tblue")) == "Paint the  car blue."
    assert rule.match("paint the car and the dog red") is None and rule.match("paint the car green") is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('end = "."', 'end = ".', "are no TOML"),
        ('end = "."', "", r"it must have the fields \['after'"),
        ('pronoun = "it"', "pronoun = 3", "pronoun must be a text, got 3"),
        ("spelling = {}", "spelling = {colour = 'x'}", "spelling.colour must have the fields"),
        ('colour = "red|blue"', "colour = 3", "words must be a table of texts"),
        ("[[rules]]", "[rules]", "rules must be a list"),
        (
            'category = "recolor"',
            'category = "colour"',
            "rule 'paint': category must be one of recolor, .*got 'colour'",
        ),
        ('name = "paint"', "", "rule 1 must have the fields"),
        ('template = "', 'text = "', "rule 'paint' must have the fields"),
        ("paint <X> <Y:colour>", "paint (<X> <Y:colour>", "rule 'paint': .* is no regular expression"),
        ("paint <X> <Y:colour>", "paint <X> <Y:hue>", "rule 'paint': there is no list of words called 'hue'"),
        ("paint <X> <Y:colour>", "paint <X> <Y> <Z>", r"rule 'paint': a pattern has \['Z'\], which the template loses"),
        ("paint <X> <Y:colour>", "paint <X>", r"rule 'paint': the template has \['Y'\], which no pattern"),
        ('"Paint {X} {Y}."', '"Paint {X} {Y}"', "rule 'paint': the template must end with '.'"),
        ("red|blue", "{colour}|blue", "rule 'paint': {colour} is made of itself"),
        ('[["paint it red", "Paint it red."]]', "[]", "rule 'paint': examples must be a list"),
        ('[["paint it red", "Paint it red."]]', '[["paint it red"]]', "rule 'paint': examples must be a list"),
    ],
)
def test_faults_of_a_file_are_named(tmp_path, old, new, message):
    assert old in FILE
    path = tmp_path / "rules.toml"
    path.write_text(FILE.replace(old, new), "utf-8")
    with pytest.raises(ValueError, match=f"rules .*rules.toml.*{message}"):
        load_rules(path)


def test_two_rules_of_a_name_and_a_missing_file_are_named(tmp_path):
    path = tmp_path / "rules.toml"
    path.write_text(FILE + FILE[FILE.index("[[rules]]") :], "utf-8")
    with pytest.raises(ValueError, match="two rules are called 'paint'"):
        load_rules(path)
    with pytest.raises(ValueError, match="none.toml cannot be read: No such file"):
        load_rules(tmp_path / "none.toml")


def test_the_files_name_only_lists_that_are_used():
    for language in LANGUAGES:
        path = instruction_rules.__file__.replace(".py", f"_{language}.toml")
        with open(path, "rb") as file:
            content = tomllib.load(file)
        rules = [str(rule["pattern"]) for rule in content["rules"]]
        text = "".join(
            [*content["words"].values(), content["never"], *(s["from"] for s in content["spelling"].values())]
        )
        for name in content["words"]:
            assert any(re.search(rf"\{{{name}\}}|<[A-Z]:{name}>", some) for some in [*rules, text]), name
