"""Every way in which an edit can be bad, from a row of JSONL through tools.prepare and shards into both scripts.

Named with row and reason, counted, never a crash in mid-training, never another sample in silence.
"""

import json
import re

import pytest

from data.index import build_index
from data.order import GlobalOrder
from data.plan import BatchPlan
from tests.collections_of_pictures import picture
from tests.script_runs import run_script
from tests.shards import write_shard
from tests.test_edit_index import count_tokens, edit, mask_bytes, without
from tests.test_prepare_edits import config, mask, no_group_stays, write_rows  # noqa: F401  (a fixture)
from tools import prepare

ROW = {"references": [picture(0, 64, 64)], "target": picture(1, 64, 64), "instruction": "Make it red."}
SHOWN = mask_bytes(64, 64, (0, 0, 32, 32))


def cut(content: bytes) -> bytes:
    return content[: len(content) * 2 // 3]


def sample(key: str, sizes=((64, 64),), **changes) -> dict:
    """An edit as members of a shard; changes: of members by name, or of the .json."""
    members = {name.replace("_", "."): changes.pop(name) for name in [*changes] if "_" in name}
    made = edit(key, list(sizes), target=(64, 64), mask=SHOWN, category="recolor", **changes)
    return made | {"members": made["members"] | members}


# What is wrong → the row, the reason that prepare counts it under and what it says; the sample in a shard that nobody
# prepared and what the run says of it.  None: cannot be wrong there.
BAD = {
    "a missing reference": (
        ROW | {"references": [picture(0, 64, 64), "gone.png"]}, "bad_reference", "reference 2: .*gone.png does not",
        lambda key: without(sample(key, [(64, 64), (64, 64)]), "ref1.png"), "says 2 references, but there is no ref1",
    ),
    "a reference of another size than promised": (
        ROW | {"reference_sizes": [[64, 32]]}, "reference_size", "reference 1 has 64 x 64 pixels, the row says 64 x 32",
        lambda key: sample(key, ref0_png=b"GIF89a" + bytes(40)), "truncated|its header is damaged",
    ),
    "a reference that is cut off": (
        ROW | {"references": [cut(picture(0, 64, 64))]}, "bad_reference", "reference 1: .*truncated",
        lambda key: sample(key, ref0_png=cut(picture(0, 64, 64))), "truncated|its header is damaged",
    ),
    "4 references": (
        ROW | {"references": [picture(n, 64, 64) for n in range(4)]}, "too_many_references", "4 references, at most 3",
        lambda key: sample(key, [(64, 64)] * 4), "its .json says 4 references; an edit has 0 to 3",
    ),
    "a mask of another size": (
        ROW | {"mask": mask(32, 64, (0, 0, 9, 9))}, "bad_mask", "its mask is 32 pixels wide and 64 high",
        lambda key: sample(key, mask_png=mask_bytes(64, 32, (0, 0, 9, 9))), "its mask has 64 x 32 pixels",
    ),
    "a mask that is cut off": (
        ROW | {"mask": cut(SHOWN)}, "bad_mask", "truncated|its header is damaged",
        lambda key: sample(key, mask_png=cut(SHOWN)), "truncated|its header is damaged",
    ),
    "a mask that is nowhere white": (
        ROW | {"mask": mask_bytes(64, 64, (0, 0, 0, 0))}, "bad_mask", "nowhere white: its lightest pixel is 0 of 255",
        lambda key: sample(key, mask_png=mask_bytes(64, 64, (0, 0, 0, 0))), "its mask is nowhere white",
    ),
    "an empty instruction": (
        ROW | {"instruction": " \n"}, "empty_caption", "no caption",
        lambda key: sample(key, captions={"en": ["  "]}), "no caption",
    ),
    "a refused instruction": (
        ROW | {"instruction": "Add a c i g a r."}, None, "of the refused words .c...",
        lambda key: sample(key, captions={"en": ["add a CIGAR"]}), "of the refused words .c...",
    ),
    "a picture's place in the instruction": (
        ROW | {"instruction": "Add <|image_pad|>."}, None, "holds <.image_pad.>, which stands for a picture",
        lambda key: sample(key, captions={"en": ["<|image_pad|>"]}), "holds <.image_pad.>, which stands for a picture",
    ),
    "an action list that breaks the schema": (
        ROW | {"actions": [{"action": "explode"}]}, "bad_actions", "action 1, action: .*explode",
        lambda key: sample(key, actions=[{"action": "remove", "bbox": [9, 0, 3, 5]}]), "action 1, bbox: .*x1 < x2",
    ),
    "a target that is cut off": (
        ROW | {"target": cut(picture(1, 64, 64))}, "undecodable", "truncated|its header is damaged",
        lambda key: sample(key, png_=cut(picture(1, 64, 64))), "truncated|its header is damaged",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Good and bad rows, prepared, and a shard of good and bad samples that nobody prepared."""
    folder = tmp_path_factory.mktemp("bad")
    colours = ("red", "blue", "green", "white", "black", "pink")
    good = [ROW | {"instruction": f"Make it {colour}.", "category": "recolor"} for colour in colours]
    rows = [*good, *(row for row, *_ in BAD.values())]
    prepare.main(config(write_rows(folder / "in", rows), folder / "shards", areas=(64,), samples_per_shard=100))
    samples = [sample(f"good{i}") for i in range(6)]
    samples += [make(f"bad{i}") for i, (*_, make, _) in enumerate(BAD.values())]
    for made in samples:  # a member called "png." is the target
        made["members"] = {name.removesuffix("."): content for name, content in made["members"].items()}
    write_shard(folder / "shards/hand.tar", samples)
    (folder / "words.txt").write_text("cigar\n", encoding="utf-8")
    return folder


def test_every_bad_row_is_named_with_its_reason(folder):
    found = [json.loads(line) for line in (folder / "shards/rejects.jsonl").read_text().splitlines()]
    expected = {6 + i: (reason, said) for i, (_, reason, said, *_) in enumerate(BAD.values()) if reason}
    assert {line["row"] for line in found} == expected.keys()
    for line in found:
        reason, said = expected[line["row"]]
        assert line["reason"] == reason and re.search(said, line["detail"]), line
        assert line["origin"].endswith(f"edits.jsonl:{line['row'] + 1}")
    report = json.loads((folder / "shards/report.json").read_text())
    assert report["kept"] == 6 + 2 and report["rows"] == 6 + len(BAD)


@pytest.mark.parametrize(
    "script, flags",
    [("train_edit_ddp.py", ["--optimizer", "adamw", "--planner_lr", "1e-4"]), ("train_mmdit.py", ["--task", "edit"])],
    ids=["ddp", "fsdp"],
)
def test_what_is_bad_in_shards_is_named_counted_and_stops_nobody(folder, tmp_path, script, flags):
    run, shards = tmp_path / "run", str(folder / "shards/*.tar")
    flags = [*flags, "--data", shards, "--validation_data", shards, "--refused_words", str(folder / "words.txt")]
    flags += ["--run_folder", str(run), "--cache_folder", str(folder / f"cache {script}"), "--num_steps", "5"]
    flags += ["--global_batch_size", "16", "--lr", "1e-3", "--warmup_steps", "1", "--eval_every", "5"]
    flags += ["--eval_samples", "30", "--sample_every", "0", "--save_every", "0", "--log_every", "1"]
    code, printed = run_script(script, flags)
    assert code == 0, printed
    log, named = (run / "train.log").read_text(encoding="utf-8"), {}
    for kind, key, said in re.findall(r"(left out|bad sample) (\S+?): (.*)", log):
        named.setdefault(key, (kind, said))
    expected = {f"hand.tar/bad{i}": said for i, (*_, said) in enumerate(BAD.values())}
    rows = {6 + i: said for i, (_, reason, said, *_) in enumerate(BAD.values()) if reason is None}
    expected |= {f"train-000000.tar/{row:010d}": said for row, said in rows.items()}
    assert named.keys() == expected.keys()
    for key, said in expected.items():
        assert re.search(said, named[key][1]), (key, named[key])
    # Counted: what the index did not find is a bad sample of a step, and what was refused is counted by itself too.
    last = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if "bad_samples" in line][-1]
    assert last["bad_samples"] == sum(kind == "bad sample" for kind, _ in named.values())
    assert last["refused"] == 2 and "cigar" not in log.lower()


def test_a_sample_that_fits_no_micro_batch_is_named_at_the_start(tmp_path):
    """Not when its turn comes, hours later."""
    shard = write_shard(tmp_path / "a.tar", [edit("small", [(64, 96)]), edit("large", [(64, 96)] * 3)])
    index = build_index([str(shard)], count_tokens, "t", tmp_path / "cache", condition_pixels=64 * 64)
    settings = {"num_ranks": 1, "rank": 0, "seed": 1, "num_empty_tokens": 5, "reference_pixels": 96 * 96}
    BatchPlan(index, GlobalOrder(2, 1, seed=1), max_tokens=200, **settings)
    with pytest.raises(ValueError, match=r"a.tar/large has \d+ tokens, and a micro-batch holds 100; .*_pixels"):
        BatchPlan(index, GlobalOrder(2, 1, seed=1), max_tokens=100, **settings)
