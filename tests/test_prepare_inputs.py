"""What tools.prepare reads, against what an independent reader of each format sees."""

import io
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import quote

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import webdataset
from PIL import Image

from data import source_table
from data.captions import parse_wordings
from data.picture_bytes import beside, read_picture_bytes
from data.row import Columns
from data.sources import fingerprint, open_sources, pieces
from tests.collections_of_pictures import KINDS, files_of, picture, records, write_collection
from tests.range_server import range_server
from tests.s3_server import KEYS, put, s3_server
from tests.shards import simple_samples, write_shard
from utils.byte_source import Patience

QUICK = Patience(max_retries=3, first_wait_s=0.01, max_wait_s=0.02, stall_s=0.5, total_s=5)


def read(path, columns=None, **options):
    """Return (picture bytes, {language: texts}, fields) of every row of an input."""
    found = []
    for source in open_sources([str(path)], columns or Columns(), **options):
        for row in source.rows(0, source.num_rows):
            assert not row.problem
            content = row.picture if isinstance(row.picture, bytes) else read_picture_bytes(row.picture)
            texts = {}
            for wording in parse_wordings(*row.caption)[0]:
                texts.setdefault(wording.language, []).append(wording.text)
            found.append((content, texts, row.fields))
    return found


def independent(path, kind):
    """Return the same by another reader: (picture bytes, English, Chinese, category)."""
    if kind == "folder":
        found = []
        for image in sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.suffix in (".png", ".jpg")):
            meta = json.loads((path / image).with_suffix(".json").read_text(encoding="utf-8"))
            found.append(
                ((path / image).read_bytes(), meta["captions"]["en"], meta["captions"]["zh"], meta["category"])
            )
        return found
    if kind == "tar":
        dataset = webdataset.WebDataset(str(path), shardshuffle=False, empty_check=False)
        samples = ((s.get("png") or s.get("jpg"), json.loads(s["json"])) for s in dataset)
        return [(i, m["captions"]["en"], m["captions"]["zh"], m["category"]) for i, m in samples]
    if kind in ("csv", "tsv"):
        parsing = pa.csv.ParseOptions(delimiter="\t" if kind == "tsv" else ",", newlines_in_values=True)
        table = pa.csv.read_csv(path, parse_options=parsing).to_pylist()
    elif kind == "jsonl":
        table = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    else:
        table = pq.read_table(path).to_pylist()
    for row in table:
        image = row.get("image")
        row["bytes"] = (path.parent / row["file_name"]).read_bytes() if image is None else image
        if isinstance(image, dict):
            row["bytes"] = image["bytes"]
    return [(row["bytes"], row["caption_en"], row["caption_zh"], row["category"]) for row in table]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_read_as_another_reader_does(tmp_path, kind):
    path = write_collection(tmp_path / "in", kind, records())
    ours, theirs = read(path), independent(path, kind)
    assert len(ours) == len(theirs) == 7
    for (content, texts, fields), (image, en, zh, category) in zip(ours, theirs, strict=True):
        assert content == image and texts == {"en": [en], "zh": [zh]} and fields == {"category": category}


@pytest.mark.parametrize("kind", KINDS)
def test_any_range_of_rows_is_that_part_of_all(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(source_table, "_STRIDE", 3)
    path = write_collection(tmp_path / "in", kind, records(8))
    [source] = open_sources([str(path)], Columns())
    rows = list(source.rows(0, 8))
    for start in range(8):
        for stop in range(start + 1, 9):
            assert list(source.rows(start, stop)) == rows[start:stop]
    assert len({row.origin for row in rows}) == 8


def test_pieces_cover_every_row_once_and_no_two_sources(tmp_path):
    inputs = [str(write_collection(tmp_path / kind, kind, records(7))) for kind in ("csv", "tar", "folder")]
    sources = open_sources(inputs, Columns())
    cut = pieces(sources, 3)
    assert [(p.first, p.start, p.stop) for p in cut] == [
        (0, 0, 3), (3, 3, 6), (6, 6, 7), (7, 0, 3), (10, 3, 6), (13, 6, 7), (14, 0, 3), (17, 3, 6), (20, 6, 7)
    ]  # fmt: skip
    assert [number for p in cut for number, _ in p.rows()] == list(range(21))


@pytest.mark.parametrize("kind", KINDS)
def test_the_fingerprint_changes_with_the_rows(tmp_path, kind):
    path = write_collection(tmp_path / "in", kind, records())
    before = fingerprint(open_sources([str(path)], Columns()))
    assert fingerprint(open_sources([str(path)], Columns())) == before
    write_collection(tmp_path / "in", kind, [*records()[:-1], records(9)[-1]])
    assert fingerprint(open_sources([str(path)], Columns())) != before


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "gb18030", "utf-16"])
def test_tables_of_other_encodings(tmp_path, encoding):
    (tmp_path / "a.png").write_bytes(picture(0))
    text = "path,caption\r\n" + "a.png,一只棕色的狐狸跳过懒狗\r\n" * 3
    (tmp_path / "t.csv").write_bytes(text.encode(encoding))
    assert [texts for _, texts, _ in read(tmp_path / "t.csv")] == [{"zh": ["一只棕色的狐狸跳过懒狗"]}] * 3


def test_columns_by_name_by_flag_and_none(tmp_path):
    (tmp_path / "a.png").write_bytes(picture(0))
    path = tmp_path / "t.csv"
    path.write_text("where,说明,en,class,score\na.png,狗,a dog,pets,7\n", encoding="utf-8")
    with pytest.raises(
        ValueError, match="no column for pictures; it has where, 说明, en, class, score; .*picture_column"
    ):
        read(path)
    with pytest.raises(ValueError, match="no column for captions; it has .*caption_columns"):
        read(path, Columns(picture="where"))
    with pytest.raises(ValueError, match="no column 'wher'"):
        read(path, Columns(picture="wher"))
    with pytest.raises(ValueError, match="no column 'zh'"):
        read(path, Columns(picture="where", captions=("en:zh",)))
    columns = Columns("where", ("zh:说明", "en:en"), category="class", keep=("score",))
    assert read(path, columns) == [(picture(0), {"zh": ["狗"], "en": ["a dog"]}, {"category": "pets", "score": "7"})]
    lists = tmp_path / "t.jsonl"
    weighted = [{"text": "a dog", "weight": 3}, "a hound", {"text": "狗"}]
    lists.write_text(json.dumps({"image": "a.png", "captions": weighted}) + "\n")
    [row] = open_sources([str(lists)], Columns())[0].rows(0, 1)
    wordings, _ = parse_wordings(*row.caption)
    assert [(w.text, w.language, w.weight) for w in wordings] == [
        ("a dog", "en", 3.0), ("a hound", "en", 1.0), ("狗", "zh", 1.0)
    ]  # fmt: skip


def test_broken_rows_have_their_problem_and_broken_files_an_error(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"image": "a.png", "caption": "x"}\n\nnot json\n[1]\n"text"\n{"caption": "y"}\n{"image": 3}\n')
    rows = list(open_sources([str(path)], Columns())[0].rows(0, 6))
    problems = [row.problem[:20] for row in rows]
    assert problems == ["", "its json cannot be r", *["its json is not an o"] * 2, *["its image is empty o"] * 2]
    path = tmp_path / "t.csv"
    path.write_text("image,caption\na.png,x\nb.png\nc.png,y,z\n,w\n")
    problems = [row.problem for row in open_sources([str(path)], Columns())[0].rows(0, 4)]
    assert problems == [
        "", "it has 1 cells, the header 2", "it has 3 cells, the header 2", "its image is empty or no text"
    ]  # fmt: skip
    path.write_text('image,caption\na.png,x\nb.png,"never closed\nc.png,y\n')
    with pytest.raises(ValueError, match="t.csv cannot be read after row 1: .*--no-quotes"):
        open_sources([str(path)], Columns())
    rows = list(open_sources([str(path)], Columns(), quotes=False)[0].rows(0, 3))
    assert json.loads(rows[1].caption[1]) == {"captions": '"never closed'}
    for text, message in (("", "is empty"), ("image,image,caption\n", "two columns called 'image'")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            open_sources([str(path)], Columns())
    (tmp_path / "t.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ValueError, match="t.parquet cannot be read as parquet"):
        open_sources([str(tmp_path / "t.parquet")], Columns())


def test_a_tar_cut_anywhere_is_refused_and_odd_members_are_named(tmp_path):
    path = write_collection(tmp_path / "in", "tar", records(3))
    whole = path.read_bytes()
    end = len(whole.rstrip(b"\0")) // 512 * 512
    for cut in range(0, end + 1024, 512):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match="some.tar"):
            open_sources([str(path)], Columns())
    members = {"png": picture(0), "txt": b"x"}
    odd = [
        {"key": "a", "members": members},
        {"key": "b", "members": {"txt": b"no picture"}},
        {"key": "c", "members": members},
    ]
    [source] = open_sources([str(write_shard(tmp_path / "odd.tar", odd))], Columns())
    assert [row.problem for row in source.rows(0, 3)] == ["", "it has txt, but no picture", ""]


def test_inputs_that_are_none(tmp_path):
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("nowhere", "is no folder or file and, as a glob, matches none"),
        ("empty", "holds no pictures"),
        ("ftp://host/a.csv", "no reader for ftp://"),
    ):
        with pytest.raises(ValueError, match=message):
            open_sources([name if "://" in name else str(tmp_path / name)], Columns())
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "a.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match=r"but .parquet; of tables and tars give the files: '.*/\*.parquet'"):
        open_sources([str(tmp_path / "tables")], Columns())
    (tmp_path / "a.xlsx").write_bytes(b"")
    with pytest.raises(ValueError, match="a.xlsx: its name must say what it is"):
        open_sources([str(tmp_path / "a.xlsx")], Columns())
    table = write_collection(tmp_path / "in", "csv", records(1))
    with pytest.raises(ValueError, match="twice"):
        open_sources([str(table), str(tmp_path / "in/*.csv")], Columns())


class _Faulty(BaseHTTPRequestHandler):
    asked: dict[str, int] = {}

    def do_GET(self):
        count = self.asked[self.path] = self.asked.get(self.path, 0) + 1
        name = self.path.partition("?")[0].strip("/")
        if name == "missing" or name == "busy" and count < 3:
            self.send_error(404 if name == "missing" else 503)
            return
        body = picture(1)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:50] if name == "always-cut" or name == "cut" and count < 2 else body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    _Faulty.asked = {}
    with HTTPServer(("127.0.0.1", 0), _Faulty) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join(5)


def test_web_addresses_heal_or_give_their_reason(server):
    for name in ("fine?size=2&name=一", "busy", "cut"):
        assert read_picture_bytes(f"{server}/{name}", QUICK) == picture(1)
    with pytest.raises(OSError, match="missing cannot be read: the server answers 404"):
        read_picture_bytes(f"{server}/missing", QUICK)
    with pytest.raises(OSError, match="always-cut cannot be read: .*IncompleteRead"):
        read_picture_bytes(f"{server}/always-cut", QUICK)
    assert _Faulty.asked["/missing"] == 1 and _Faulty.asked["/always-cut"] == 4
    with pytest.raises(ValueError, match="no reader for file://"):
        read_picture_bytes("file:///etc/hostname", QUICK)
    with pytest.raises(OSError, match="127.0.0.1:9/x cannot be read: ConnectionRefusedError"):
        read_picture_bytes("http://127.0.0.1:9/x", QUICK)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet-struct", "tar"])
def test_tables_and_archives_on_a_server_are_read_as_local_ones(tmp_path, kind):
    path = write_collection(tmp_path / "in", kind, records())
    with range_server({f"/in/{name}": content for name, content in files_of(tmp_path / "in").items()}) as server:
        server.faults = [503, "cut"]
        assert read(f"{server.url}/in/{path.name}") == read(path)
        with pytest.raises(ValueError, match="nowhere.csv does not exist"):
            open_sources([f"{server.url}/in/nowhere.csv"], Columns())


def test_a_table_and_its_pictures_in_a_bucket(tmp_path, monkeypatch):
    path = write_collection(tmp_path / "in", "csv", records(3))
    with range_server({f"/bucket/{name}": content for name, content in files_of(tmp_path / "in").items()}) as server:
        for name, value in (("ENDPOINT_URL", server.url), ("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b"),
                            ("REGION", "eu-north-1")):  # fmt: skip
            monkeypatch.setenv(f"AWS_{name}", value)
        assert read("s3://bucket/table.csv") == read(path)


def test_a_folder_of_pictures_in_a_bucket(tmp_path, monkeypatch):
    """As the same folder on a disk; also names with characters that mean something in a URL; tars by a pattern."""
    folder = write_collection(tmp_path / "in", "folder", records(5))
    (folder / "50% off? 1+1.png").write_bytes(picture(7))
    (folder / "50% off? 1+1.txt").write_text("a sale")
    write_shard(tmp_path / "a.tar", simple_samples(2))
    with s3_server() as url:
        for name, value in (KEYS | {"AWS_ENDPOINT_URL": url}).items():
            monkeypatch.setenv(name, value)
        put(url, "/bucket")
        for name, content in files_of(folder).items():
            put(url, f"/bucket/set/{quote(name)}", content)
        for name in ("a.tar", "b.tar"):
            put(url, f"/bucket/tars/{name}", (tmp_path / "a.tar").read_bytes())
        assert read("s3://bucket/set") == read("s3://bucket/set/") == read(folder)
        [remote], [local] = (open_sources([str(place)], Columns()) for place in ("s3://bucket/set", folder))
        origins = [[row.origin.removeprefix(s.location) for row in s.rows(2, 6)] for s in (remote, local)]
        assert origins[0] == origins[1] and remote.ignored == []
        assert [s.location for s in open_sources(["s3://bucket/tars/*.tar"], Columns())] == [
            "s3://bucket/tars/a.tar", "s3://bucket/tars/b.tar",
        ]  # fmt: skip
        for wrong, message in (
            ("s3://bucket/tars", "holds no pictures .*, but .tar; .* give the files: 's3://bucket/tars/\\*.tar'"),
            ("s3://bucket/empty", "holds no pictures"),
            ("s3://elsewhere/set", "--input s3://elsewhere/set cannot be listed: "),
            ("s3://bucket/tars/*.csv", "matches none"),
            ("https://host/set", "its name must say what it is"),
            ("https://host/*.tar", "a web server does not list its files"),
        ):
            with pytest.raises(ValueError, match=message):
                open_sources([wrong], Columns())


def test_a_lost_object_costs_seconds_not_minutes(monkeypatch):
    """A row's picture is given up as one from the web is."""
    with range_server({"/bucket/a.png": b"some bytes"}) as server:
        for name, value in (KEYS | {"AWS_ENDPOINT_URL": server.url}).items():
            monkeypatch.setenv(name, value)
        server.faults = [503] * 100
        monkeypatch.setattr("data.picture_bytes.WEB_PATIENCE", QUICK)
        with pytest.raises(OSError, match="s3://bucket/a.png could not be read"):
            read_picture_bytes("s3://bucket/a.png")
        assert len(server.requests) == 1 + 1 + QUICK.max_retries  # its size, and every attempt


def test_a_folder_without_pictures_says_what_there_is(tmp_path):
    (tmp_path / "a.TXT").write_text("x")
    with pytest.raises(ValueError, match=r"holds no pictures \(.*\), but .txt$"):
        open_sources([str(tmp_path)], Columns())
    (tmp_path / "b.parquet").write_text("x")
    with pytest.raises(ValueError, match=r"but .parquet, .txt; of tables and tars give the files: '.*/\*.parquet'$"):
        open_sources([str(tmp_path)], Columns())


def test_names_in_a_table_are_relative_to_it():
    assert beside("https://host/a/t.csv", "pictures/b.png") == "https://host/a/pictures/b.png"
    assert beside("https://host/a/t.csv", "s3://other/b.png") == "s3://other/b.png"
    assert beside("some/t.csv", "b.png") == "some/b.png" and beside("some/t.csv", "/b.png") == "/b.png"


def test_a_folder_pairs_by_stem_and_names_what_it_ignores(tmp_path):
    for name in ("a.JPG", "a.TXT", "b.png", "b.txt", "b.json", "c.d.png", "c.d.txt", "c.txt", "deep/a.png", ".png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f'"{name}"')
    (tmp_path / "link").symlink_to(tmp_path / "deep")
    [source] = open_sources([str(tmp_path)], Columns())
    found = {row.origin.removeprefix(f"{tmp_path}/"): row.caption for row in source.rows(0, source.num_rows)}
    assert found == {
        ".png": None, "a.JPG": ("txt", b'"a.TXT"'), "b.png": ("json", b'"b.json"'), "c.d.png": ("txt", b'"c.d.txt"'),
        "deep/a.png": None,
    }  # fmt: skip
    assert source.ignored == [f"{tmp_path}/{name}" for name in ("b.txt", "c.txt", "link")]


def test_pictures_are_read_whole(tmp_path):
    (tmp_path / "a.png").write_bytes(picture(3, 300, 300))
    assert Image.open(io.BytesIO(read_picture_bytes(str(tmp_path / "a.png")))).size == (300, 300)
    with pytest.raises(OSError, match="does not exist"):
        read_picture_bytes(str(tmp_path / "b.png"))
    with pytest.raises(OSError, match="is no file"):
        read_picture_bytes(str(tmp_path))
