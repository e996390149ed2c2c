"""Rules that put loose instructions into one wording, read from a file a language and checked."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CATEGORIES = ("recolor", "replace", "transform", "add", "remove", "background", "move", "text")
LANGUAGES = ("en", "zh")
QUOTED = "[\ue000-\uf8ff]"  # what stands for quoted text while rules are looked at
_FILE_FIELDS = {
    "before",
    "after",
    "end",
    "never",
    "never_alone",
    "pronoun",
    "pronouns",
    "space",
    "words",
    "spelling",
    "rules",
}
_FIELDS = {"name", "category", "pattern", "template", "examples"}
_PART = re.compile(r"<([A-Z])(?::([a-z_]+)|(\+))?>")
_WORDS = re.compile(r"\{([a-z_]+)\}")
_MAX_NESTING = 4
_SLOT = re.compile(r"\{([A-Z])\}")


@dataclass(frozen=True)
class Rule:
    """One rule: what it takes, and what that becomes.

    template: parts as {X}; what stands in square brackets is left out where one of its parts is missing.
    """

    name: str
    category: str
    patterns: tuple[re.Pattern, ...]
    kinds: Mapping[str, str]  # of parts that are from a list: its name
    template: str
    examples: tuple[tuple[str, str], ...]

    @property
    def slots(self) -> set[str]:
        """Return the parts that the template takes."""
        return set(_SLOT.findall(self.template))

    def match(self, instruction: str) -> dict[str, str | None] | None:
        """Return the parts of an instruction that the rule fits, else None."""
        matches = (pattern.fullmatch(instruction) for pattern in self.patterns)
        return next((match.groupdict() for match in matches if match), None)

    def fill(self, parts: Mapping[str, str | None]) -> str:
        """Return the template with its parts."""

        def optional(match: re.Match) -> str:
            return match[1] if all(parts.get(name) for name in _SLOT.findall(match[1])) else ""

        shown = re.sub(r"\[(.*?)\]", optional, self.template)
        return _SLOT.sub(lambda match: parts.get(match[1]) or "", shown)


@dataclass(frozen=True)
class RuleBook:
    """The rules of a language, in the order in which they are tried."""

    before: re.Pattern  # politeness before an instruction
    after: re.Pattern  # and behind it
    end: str  # with which a wording ends
    pronoun: str  # for what is not named
    pronouns: re.Pattern  # what names nothing
    spellings: Mapping[str, tuple[re.Pattern, str]]  # of parts from a list, what they become: "红的" → "红色"
    rules: tuple[Rule, ...]


@cache
def rule_book(language: str) -> RuleBook:
    """Return the rules of one of LANGUAGES."""
    return load_rules(Path(__file__).with_name(f"instruction_rules_{language}.toml"))


def load_rules(path: str | Path) -> RuleBook:
    """Read a file of rules; how they are written is said in the files.

    Raises: ValueError that names the file, the rule and what is wrong.
    """
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"the rules {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"the rules {path} are no TOML: {error}") from error
    try:
        return _rule_book(content)
    except ValueError as error:
        raise ValueError(f"rules {path}: {error}") from error


def _rule_book(content: dict) -> RuleBook:
    _check_fields("it", content, _FILE_FIELDS)
    words, spellings = content["words"], content["spelling"]
    if not isinstance(words, dict) or not all(isinstance(text, str) for text in words.values()):
        raise ValueError("words must be a table of texts")
    if not isinstance(spellings, dict):
        raise ValueError(f"spelling must be a table, got {spellings!r}")
    for kind, spelling in spellings.items():
        _check_fields(f"spelling.{kind}", spelling, {"from", "to"})
    for name in _FILE_FIELDS - {"words", "spelling", "rules"}:
        if not isinstance(content[name], str):
            raise ValueError(f"{name} must be a text, got {content[name]!r}")
    if not isinstance(content["rules"], list) or not content["rules"]:
        raise ValueError("rules must be a list of one table or more")
    rules = [_rule(n, rule, content) for n, rule in enumerate(content["rules"])]
    names = [rule.name for rule in rules]
    for n, name in enumerate(names):
        if name in names[:n]:
            raise ValueError(f"two rules are called {name!r}")
    frame = {name: _compiled(name, content[name], content) for name in ("before", "after", "pronouns")}
    spelled = {
        kind: (_compiled(f"spelling.{kind}", spelling["from"], content), spelling["to"])
        for kind, spelling in spellings.items()
    }
    return RuleBook(**frame, end=content["end"], pronoun=content["pronoun"], spellings=spelled, rules=tuple(rules))


def _rule(number: int, rule: object, content: dict) -> Rule:
    where = f"rule {rule['name']!r}" if isinstance(rule, dict) and "name" in rule else f"rule {number + 1}"
    _check_fields(where, rule, _FIELDS)
    for name in ("name", "category", "template"):
        if not isinstance(rule[name], str) or not rule[name]:
            raise ValueError(f"{where}: {name} must be a text, got {rule[name]!r}")
    if rule["category"] not in CATEGORIES:
        raise ValueError(f"{where}: category must be one of {', '.join(CATEGORIES)}, got {rule['category']!r}")
    written = rule["pattern"] if isinstance(rule["pattern"], list) else [rule["pattern"]]
    if not written or not all(isinstance(pattern, str) and pattern for pattern in written):
        raise ValueError(f"{where}: pattern must be a text or a list of texts, got {rule['pattern']!r}")
    examples = rule["examples"]
    if not isinstance(examples, list) or not examples or not all(map(_is_example, examples)):
        raise ValueError(f"{where}: examples must be a list of [loose wording, canonical wording], got {examples!r}")
    patterns = [_compiled(where, pattern, content) for pattern in written]
    slots, parts = set(_SLOT.findall(rule["template"])), {name for pattern in patterns for name in pattern.groupindex}
    if unknown := slots - parts - {"X"}:
        raise ValueError(f"{where}: the template has {sorted(unknown)}, which no pattern of it has")
    if lost := parts - slots:
        raise ValueError(f"{where}: a pattern has {sorted(lost)}, which the template loses")
    if not rule["template"].endswith(content["end"]):
        raise ValueError(f"{where}: the template must end with {content['end']!r}, got {rule['template']!r}")
    kinds = {match[1]: match[2] for pattern in written for match in _PART.finditer(pattern) if match[2]}
    return Rule(rule["name"], rule["category"], tuple(patterns), kinds, rule["template"], tuple(map(tuple, examples)))


def _is_example(pair: object) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) and text for text in pair)


def _compiled(where: str, pattern: str, content: dict) -> re.Pattern:
    """Compile a pattern with {words} and <parts>."""

    def words(match: re.Match) -> str:
        if match[1] not in content["words"]:
            raise ValueError(
                f"{where}: there is no list of words called {match[1]!r}; there are {list(content['words'])}"
            )
        return f"(?:{content['words'][match[1]]})"

    def part(match: re.Match) -> str:
        name, kind, several = match.groups()
        if kind == "quoted":
            return f"(?P<{name}>{QUOTED})"
        if kind:
            return f"(?P<{name}>{{{kind}}})"
        forbidden = content["never"] if several else f"{content['never']}|{content['never_alone']}"
        return rf"(?P<{name}>(?!\s)(?:(?!{forbidden})[^\n])+?(?<!\s))"

    expanded = _PART.sub(part, pattern)
    for _ in range(_MAX_NESTING):  # words may be made of words
        expanded = _WORDS.sub(words, expanded)
    if nested := _WORDS.search(expanded):
        raise ValueError(f"{where}: {nested[0]} is made of itself, or nested more than {_MAX_NESTING} deep")
    try:
        return re.compile(expanded.replace(" ", content["space"]), re.IGNORECASE)
    except re.error as error:
        raise ValueError(f"{where}: {pattern!r} is no regular expression: {error}") from error


def _check_fields(where: str, value: object, fields: set[str]) -> None:
    if not isinstance(value, dict) or value.keys() != fields:
        there = sorted(value) if isinstance(value, dict) else type(value).__name__
        raise ValueError(f"{where} must have the fields {sorted(fields)}, got {there}")
