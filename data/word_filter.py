"""A user's list of words and phrases that no instruction may hold, found through simple evasions."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path
from threading import Lock

from data.captions import decode_text
from data.folded_text import CJK, LETTERS, WORD_CHARACTERS, fold

_COMMENT = re.compile(r"(?:^|\s)#.*")
_CLAUSE_END = re.compile(r"[,!?;:。、\n\r\u2028\u2029]")  # as NFKC leaves them; a full stop can stand inside a word
_BETWEEN_WORDS = re.compile(r"""[.,!?;:/&()\[\]{}<>"“”]+""")  # where two words of letters meet without a space
_CONTRACTION = re.compile(r"['’ʼ](?:s|t|d|m|ll|re|ve)(?![^\W_])")  # he'll is not hell
_BESIDE_WORDS = "\"'“”‘’`.,;:!?…()[]{}<>、。「」『』《》-–—_/\\|• "  # may stand beside a word and says nothing
# Where a run of letters without a vowel is hardly a word, and which letters are words.  Other scripts write no vowels.
_WITH_VOWELS = re.compile("[a-z\u0370-\u03ff\u0400-\u052f\u1f00-\u1fff]+")
_VOWEL = re.compile("[aeiouyαεηιουωάέήίόύώϊϋаеёиоуыэюяіїє]")
_ONE_LETTER_WORDS = "ai" + "авийкосуяєзі" + "οηή" + "و"  # Latin, Cyrillic, Greek, Arabic
_NEVER, _CLAUSE, _SPACE, _INSIDE = range(4)  # what stands between two runs of letters, from most apart to least


class RefusedInstructionError(ValueError):
    """An instruction holds a refused word; the message names it by its first letter."""


@dataclass(frozen=True)
class _Word:
    """A word of the list.  pieces, runs: of Latin words, see `_squeeze`."""

    mask: str
    pieces: tuple[str, ...] = ()
    runs: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Piece:
    """A run of letters and digits in a text."""

    letters: str  # squeezed
    runs: tuple[int, ...]
    gap: int  # to the piece before

    @property
    def is_letter(self) -> bool:
        """Whether it is one letter that is no word: no a, no I."""
        return self.runs == (1,) and self.letters.isalpha() and self.letters not in _ONE_LETTER_WORDS

    @property
    def is_odd(self) -> bool:
        """Whether it is hardly a word of its own."""
        if self.runs == (1,):
            return self.is_letter
        return bool(_WITH_VOWELS.fullmatch(self.letters)) and not _VOWEL.search(self.letters)


class WordFilter:
    """Refuses texts with a word or phrase of a list; counts them; never shows a word in full.

    Texts and words are compared as `data.folded_text` folds them: any case, width, accents, characters of no width.

    Latin (and other scripts with spaces between words): whole words, so "ass" is not in "glass" or "class", and other
    forms of a word must be listed too.  Found as well: letters three or more times instead of once, or several doubled
    ("fuuuck", "ffuuck", but "good" is not "god"); punctuation inside ("f*u-ck"); spaces inside, where a piece is hardly
    a word of its own ("f u c k", "f uck", "fu ck", but "pen is" and "he'll" are what they are).  Letters that are
    spelled out must be the word, no more and no less: "h e l l o" holds no other word.

    Chinese, Japanese, Korean: anywhere in the text, through spaces and punctuation; through commas and full stops,
    where sentences meet by chance, only if the word has three characters or more and they are between all of them.

    A word that begins or ends with a symbol ("C++", "#metoo", "$$$") and symbols alone ("🔞") are found as they are
    written; quotes, brackets and other punctuation around a word of the list say nothing.

    Not found: other spellings (s3x, pinyin), words wholly in another script's letters that look Latin, and traditional
    characters for simplified ones: list both.  A text is looked through once; a word more in the list costs nothing.
    """

    def __init__(self, words: Iterable[str]):
        """Take words and phrases in any language.  Raises: ValueError for one without a letter or symbol."""
        self.num_refused = 0
        self._lock = Lock()
        self._latin: dict[str, list[_Word]] = defaultdict(list)  # by their letters, squeezed
        self._cjk: dict[str, _Word] = {}
        self._symbols: dict[str, _Word] = {}  # without letters, such as emoji
        for word in words:
            self._add(word)
        self._max_letters = max(map(len, self._latin), default=0)
        lengths = defaultdict(set)
        for word in self._cjk:
            lengths[word[0]].add(len(word))
        self._lengths = {first: sorted(some) for first, some in lengths.items()}

    @classmethod
    def from_file(cls, path: str | Path) -> "WordFilter":
        """Read a list: a word or phrase a line, in any encoding; what follows a # at its start or after a space is not.

        Raises: ValueError if it cannot be read, has no word, or a line has nothing to be seen.
        """
        try:
            lines = decode_text(Path(path).read_bytes()).splitlines()
        except OSError as error:
            raise ValueError(f"the list of refused words {path} cannot be read: {error.strerror}") from error
        found = {n: word for n, line in enumerate(lines, 1) if (word := _COMMENT.sub("", line).strip())}
        if not found:
            raise ValueError(f"the list of refused words {path} has no word; give none to refuse nothing")
        for number, word in found.items():
            if not _core(word):
                raise ValueError(f"the list of refused words {path}, line {number}: {_nothing(word)}; remove the line")
        return cls(found.values())

    @classmethod
    def of_run(cls, path: str) -> "WordFilter":
        """Return what a run's --refused_words names; nothing refuses nothing."""
        return cls.from_file(path) if path else cls(())

    def check(self, text: str) -> None:
        """Raise RefusedInstructionError if the text has a word of the list, and count it."""
        if masked := self.matches(text):
            with self._lock:
                self.num_refused += 1
            raise RefusedInstructionError(
                f"the instruction has {len(masked)} of the refused words ({', '.join(masked)}); say it without"
            )

    def matches(self, text: str) -> list[str]:
        """Return the words of the list that are in the text, each once, masked: its first character and ***."""
        text = fold(text)
        found = dict.fromkeys(self._latin_words(text)) | dict.fromkeys(self._cjk_words(text))
        found |= dict.fromkeys(word for symbols, word in self._symbols.items() if _stands_in(text, symbols))
        return [word.mask for word in found]

    def _add(self, word: str) -> None:
        folded = _core(word)
        if not folded:
            raise ValueError(f"a refused word says nothing ({_nothing(word)}): {word!r}")
        letters = "".join(WORD_CHARACTERS.findall(folded))
        mask = f"{letters[0]}***" if len(letters) > 1 else "***"
        if not letters:
            self._symbols[folded] = _Word("a symbol")
        elif not (WORD_CHARACTERS.match(folded) and WORD_CHARACTERS.match(folded[-1])):
            self._symbols[folded] = _Word(mask)
        elif CJK.search(letters):
            self._cjk[letters] = _Word(mask)
        else:
            squeezed, runs = _squeeze(letters)
            entry = _Word(mask, tuple(_squeeze(piece)[0] for piece in LETTERS.findall(folded)), runs)
            if entry not in self._latin[squeezed]:
                self._latin[squeezed].append(entry)

    # ---- Latin ------------------------------------------------------------------------------------------------------
    def _latin_words(self, text: str) -> Iterator[_Word]:
        if not self._latin:
            return
        pieces = list(_pieces(text))
        for first, piece in enumerate(pieces):
            letters, runs = piece.letters, piece.runs
            for last in range(first, min(len(pieces), first + self._max_letters)):
                if last > first:
                    if pieces[last].gap == _NEVER:
                        break
                    letters, runs = _join(letters, runs, pieces[last].letters, pieces[last].runs)
                if len(letters) > self._max_letters:
                    break
                for word in self._latin.get(letters, ()):
                    if _is_stretched(runs, word.runs, letters) and _is_one(pieces, first, last, word):
                        yield word

    # ---- Chinese ----------------------------------------------------------------------------------------------------
    def _cjk_words(self, text: str) -> Iterator[_Word]:
        if not self._cjk:
            return
        places = [n for n, char in enumerate(text) if char.isalnum() or CJK.match(char)]
        letters = "".join(text[n] for n in places)
        between = [text[a + 1 : b] for a, b in zip(places, places[1:], strict=False)]  # letter i and letter i + 1
        apart = [0, *accumulate(bool(some) for some in between)]  # gaps before letter i
        ended = [0, *accumulate(bool(_CLAUSE_END.search(some)) for some in between)]
        for first, char in enumerate(letters):
            for length in self._lengths.get(char, ()):
                last = first + length - 1
                if last >= len(letters) or (word := self._cjk.get(letters[first : last + 1])) is None:
                    continue
                spelled_out = length > 2 and apart[last] - apart[first] == length - 1
                if ended[last] != ended[first] and not spelled_out:
                    continue
                # A Latin letter at its end must be the end of a word.
                if all(
                    not (0 <= a and b < len(letters)) or between[a] or CJK.match(letters[a]) or CJK.match(letters[b])
                    for a, b in ((first - 1, first), (last, last + 1))
                ):
                    yield word


def _core(word: str) -> str:
    """Return a word of the list, folded, without what may stand beside any word."""
    return fold(word).strip().strip(_BESIDE_WORDS)


def _nothing(word: str) -> str:
    return "it is punctuation, which every text may have" if fold(word).strip() else "nothing to be seen in it"


def _stands_in(text: str, symbols: str) -> bool:
    """Tell whether symbols are in a text; where they begin or end with a letter, not in the midst of a word."""
    starts, ends = WORD_CHARACTERS.match(symbols), WORD_CHARACTERS.match(symbols[-1])
    at = text.find(symbols)
    while at >= 0:
        end = at + len(symbols)
        inside = starts and at and WORD_CHARACTERS.match(text[at - 1])
        if not inside and not (ends and WORD_CHARACTERS.match(text[end : end + 1])):
            return True
        at = text.find(symbols, at + 1)
    return False


def _squeeze(letters: str) -> tuple[str, tuple[int, ...]]:
    """Return the letters without repeats, and how often each stands there: "good" is "god" and (1, 2, 1)."""
    runs = [(char, sum(1 for _ in same)) for char, same in groupby(letters)]
    return "".join(char for char, _ in runs), tuple(count for _, count in runs)


def _join(a: str, a_runs: tuple[int, ...], b: str, b_runs: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    if a[-1] != b[0]:
        return a + b, a_runs + b_runs
    return a + b[1:], (*a_runs[:-1], a_runs[-1] + b_runs[0], *b_runs[1:])


def _is_stretched(runs: tuple[int, ...], wanted: tuple[int, ...], letters: str) -> bool:
    """Tell whether a word is `wanted`, as it is or with letters repeated beyond what spelling does."""
    longer = [n for n, want in zip(runs, wanted, strict=True) if n > want]
    if any(n < want or (n > want and char.isdigit()) for n, want, char in zip(runs, wanted, letters, strict=True)):
        return False
    return not longer or max(longer) > 2 or len(longer) > 1


def _pieces(text: str) -> Iterator[_Piece]:
    """Yield a folded text's runs of letters and digits."""
    end, before = 0, ""
    for match in LETTERS.finditer(text):
        gap = _gap(text[end : match.start()], before, match.group()) if before else _NEVER
        if before and match.start() - end == 1 and _CONTRACTION.match(text, end):
            gap = _NEVER
        yield _Piece(*_squeeze(match.group()), gap)
        end, before = match.end(), match.group()


def _gap(between: str, before: str, after: str) -> int:
    """Return how far apart two runs of letters are."""
    if CJK.search(between) or (between in (".", ",") and before[-1].isdigit() and after[0].isdigit()):
        return _NEVER
    spaced = any(map(str.isspace, between))
    if spaced and ("\n" in between or re.search("[.,!?;:]", between)):
        return _CLAUSE
    if spaced or (_BETWEEN_WORDS.fullmatch(between) and min(len(before), len(after)) > 1):
        return _SPACE
    return _INSIDE


def _is_one(pieces: list[_Piece], first: int, last: int, word: _Word) -> bool:
    """Tell whether pieces whose letters are those of a word are that word, not others that meet by chance."""
    if first == last:
        return True
    some, gaps = pieces[first : last + 1], [piece.gap for piece in pieces[first + 1 : last + 1]]
    if tuple(piece.letters for piece in some) == word.pieces and min(gaps) > _CLAUSE:
        return True  # a phrase, as it is listed
    after = pieces[last + 1] if last + 1 < len(pieces) and pieces[last + 1].gap > _CLAUSE else None
    before = pieces[first - 1] if some[0].gap > _CLAUSE else None
    if any(piece.is_odd for piece in some):
        # Spelled out: nothing else that is spelled out stands beside it.
        alone = not any(piece and piece.is_letter for piece in (before, after))
        return alone and (min(gaps) > _CLAUSE or all(piece.runs == (1,) for piece in some))
    return min(gaps) == _INSIDE and _INSIDE not in (some[0].gap, after.gap if after else _NEVER)
