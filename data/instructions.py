"""Loose instructions in one wording a kind of edit, in English and Chinese; what no rule fits stays as it is."""

import re
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from data.captions import language_of
from data.instruction_rules import LANGUAGES, QUOTED, RuleBook, rule_book
from utils.random_streams import uniform

MAX_LENGTH = 300  # characters; nobody is that long about one edit
_QUOTE = re.compile(
    r"""“[^“”]*”|"[^"\n]*"|「[^「」]*」|『[^『』]*』|《[^《》]*》|«[^«»]*»|‘[^‘]*?’(?![A-Za-z])|(?<![A-Za-zÀ-ɏ0-9_])'[^'\n]+'(?![A-Za-zÀ-ɏ0-9_])"""
)
_STRAY_QUOTE = re.compile(r"""["“”「」『』《》«»‘]""")
_PRIVATE = re.compile(QUOTED)
_NUMBER = re.compile(
    r"\d+|[二三四五六七八九十两百千万]|\b(?:two|three|four|five|six|seven|eight|nine|ten)\b", re.IGNORECASE
)


@dataclass(frozen=True)
class Normalized:
    """An instruction, and what it was put into."""

    text: str
    rule: str | None  # which fitted; None: none did, and the text is the original
    original: str


def normalize(instruction: str, language: str | None = None, subject: str | None = None) -> Normalized:
    """Put an instruction into its canonical wording.

    Quoted text stays character by character, and so do numbers and what is named: a rule that lost some of it is not
    taken.  A canonical wording stays as it is.  So does an instruction of several edits, one that forbids something,
    and one of over 300 characters.

    language: en or zh; None = found by the script; others have no rules.
    subject: what to name where the instruction says "it" or nothing; None = say "it".
    """
    language = language_of(instruction) if language is None else language
    if language not in LANGUAGES:
        return Normalized(instruction, None, instruction)
    text, rule = _canonical(instruction, language, subject)
    if rule is not None and _canonical(text, language, subject)[0] == text:
        return Normalized(text, rule, instruction)
    return Normalized(instruction, None, instruction)


def trained_wording(sample, probability: float, seed: int) -> str:
    """Return a sample's caption, or of an edit with a probability the canonical wording of its instruction.

    sample: a `data.reader.Sample`; the draw belongs to (seed, epoch, sample).
    """
    if sample.references is None or sample.plan.reconstructs:
        return sample.caption
    return choose_wording(sample.caption, probability, uniform(seed, sample.plan.epoch, sample.key, "normalize"))


def choose_wording(instruction: str, probability: float, draw: float) -> str:
    """Return the canonical wording with a probability, else the instruction as it is.

    draw: a number in [0, 1) that belongs to the sample.  Raises: ValueError if `probability` is none.
    """
    if not 0.0 <= probability <= 1.0:
        raise ValueError(f"--normalize is a probability, got {probability}")
    return normalize(instruction).text if draw < probability else instruction


@lru_cache(1 << 16)
def _canonical(instruction: str, language: str, subject: str | None) -> tuple[str, str | None]:
    """Return the wording of the first rule that fits, and the rule."""
    if len(instruction) > MAX_LENGTH or _PRIVATE.search(instruction):
        return instruction, None
    quoted: list[str] = []

    def hide(match: re.Match) -> str:
        quoted.append(match[0])
        return chr(0xE000 + len(quoted) - 1)

    hidden = _QUOTE.sub(hide, instruction)
    if _STRAY_QUOTE.search(hidden):
        return instruction, None
    book = rule_book(language)
    asked = _bare(hidden, book)
    for rule in book.rules:
        if (parts := rule.match(asked)) is None:
            continue
        if "X" in rule.slots and (not parts.get("X") or book.pronouns.fullmatch(parts["X"])):
            parts["X"] = subject or parts.get("X") or book.pronoun
        for name, kind in rule.kinds.items():
            if kind in book.spellings and parts.get(name):
                pattern, spelling = book.spellings[kind]
                parts[name] = found.expand(spelling) if (found := pattern.fullmatch(parts[name])) else parts[name]
        text = rule.fill(parts)
        text = text[:1].upper() + text[1:]
        if _kept(hidden, text, subject or ""):
            return _PRIVATE.sub(lambda found: quoted[ord(found[0]) - 0xE000], text), rule.name
    return instruction, None


def _bare(hidden: str, book: RuleBook) -> str:
    """Return an instruction without what is said for politeness, spaces at its ends and the mark at its end."""
    while (rest := book.after.sub("", book.before.sub("", hidden.strip()))) != hidden:
        hidden = rest
    return hidden


def _kept(hidden: str, text: str, subject: str) -> bool:
    """Tell whether the numbers and the quoted texts of an instruction are all in a wording, each once."""
    numbers = Counter(_NUMBER.findall(hidden)) + Counter(_NUMBER.findall(subject))
    before, after = _PRIVATE.findall(hidden), _PRIVATE.findall(text)
    return sorted(before) == sorted(after) and (
        Counter(_NUMBER.findall(text)) in (numbers, Counter(_NUMBER.findall(hidden)))
    )
