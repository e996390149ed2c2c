"""What tools.prepare shows: the report's page, and its progress."""

import io
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from data.index import build_index
from tests.collections_of_pictures import FAULTY_REASONS, faulty_collection, prepare_config
from tools import prepare
from tools.prepare_progress import Progress
from tools.prepare_sample import REASONS

TINY = Path(__file__).resolve().parent.parent / "assets/tiny"
pytestmark = pytest.mark.usefixtures("no_group_stays")


class _Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.tags, self.sources = [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.sources += [value for name, value in attributes if name in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_report_is_one_sound_page_that_needs_nothing_else(tmp_path):
    source = faulty_collection(tmp_path / "in")
    (source / "00-good.txt").write_text("<script>alert('一')</script> & more")
    prepare.main(prepare_config(source, tmp_path / "out", name="宠物", category="<b>pets</b>", model=str(TINY),
                        cache_folder=str(tmp_path / "cache")))  # fmt: skip
    text = (tmp_path / "out/report.html").read_text(encoding="utf-8")
    parsed = _Page()
    parsed.feed(text)
    assert not parsed.open and parsed.tags.count("svg") >= 6
    assert not {"script", "link", "iframe", "b>pets"} & set(parsed.tags) and "url(" not in text
    assert parsed.sources and all(source.startswith("data:image/jpeg;base64,") for source in parsed.sources)
    assert "&lt;script&gt;alert(&#x27;一&#x27;)" in text and "宠物" in text and "第1个" in text
    assert all(name.capitalize() in text for reason, name in REASONS.items() if reason in FAULTY_REASONS.values())
    # With a tokenizer lengths are tokens, and the index is there: it needs no token counted again.
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["caption_length_unit"] == "tokens"
    assert report["shards"] == 6

    from model.text_encoder import TextEncoder

    tokenizer = TextEncoder.tokenizer_only(TINY)
    shards = [str(path) for path in sorted((tmp_path / "out").glob("*.tar"))]
    index = build_index(shards, lambda text: 1 / 0, tokenizer.tokenizer_id, tmp_path / "cache")
    tokens = [n for i in range(len(index)) for n in index[i].caption_tokens.get("zh", ())]
    spread = report["caption_lengths"]["zh"]
    assert sum(spread["counts"].values()) == len(tokens) and spread["max"] == max(tokens)
    assert spread["mean"] == pytest.approx(sum(tokens) / len(tokens), abs=0.01)


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_on_a_terminal_and_lines_elsewhere(monkeypatch, caplog):
    caplog.set_level("INFO", "prepare")
    for screen in (_Terminal(), io.StringIO()):
        monkeypatch.setattr("sys.stderr", screen)
        with Progress(12, True, 2) as progress:
            progress.skip(4)
            for _ in range(8):
                progress.advance()
        lines = [record.getMessage() for record in caplog.records]
        if screen.isatty():
            assert "rank 0 of 2: 100%" in screen.getvalue() and "12/12" in screen.getvalue() and not lines
            assert "pictures/s" in screen.getvalue()
        else:
            assert not screen.getvalue() and len(lines) == 1
            assert lines[0].startswith("12/12 pictures of 1 of 2 processes, ") and lines[0].endswith("/s, 00:00 left")
