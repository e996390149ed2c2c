"""The rehearsal of faults: what it plans, and a table of two runs that were really disturbed."""

from dataclasses import dataclass

import pytest

from tools import chaos
from tools.chaos_report import BEGIN, END, Outcome, check_table, markdown, write_table
from tools.chaos_run import Launcher
from utils.config import parse
from utils.fault_injection import KINDS, parse_faults


@dataclass(frozen=True)
class Steps:
    num_steps: int = 0
    lr: float = 0.0


def test_each_kind_gets_a_run_and_saves_are_disturbed_at_a_save():
    planned = chaos.cases(chaos.Config(ranks=4), 60, 4)
    assert list(planned) == list(chaos.CASES) and set(planned) == set(KINDS)
    for kind, faults in planned.items():
        for fault in faults:
            assert fault.kind == kind and fault.rank == 3 and (fault.step == 8) == (fault.phase == "checkpoint")
            assert parse_faults(fault.name) == [fault]
    assert [len(faults) for kind, faults in planned.items() if len(faults) > 1] == [2]  # to go back takes two


def test_random_faults_are_the_same_for_a_seed_and_leave_the_weights_alone():
    config = chaos.Config(random=12, seed=3)
    (faults,) = chaos.cases(config, 60, 5).values()
    assert len(faults) == 12 and chaos.cases(config, 60, 5) == {"12 random faults": faults}
    assert chaos.cases(chaos.Config(random=12, seed=4), 60, 5) != {"12 random faults": faults}
    assert {"kill", "term", "hang", "full"} < {f.kind for f in faults} and len({f.step for f in faults}) == 12
    assert all(f.kind not in ("nan", "spike", "badsample") and f.kind[:2] != "s3" and 0 < f.step < 60 for f in faults)
    assert all(f.step % 5 == 0 for f in faults if f.phase == "checkpoint")
    for seed in range(20):
        (faults,) = chaos.cases(chaos.Config(random=12, seed=seed, checkpoints="s3"), 60, 5).values()
        assert {"kill", "term", "hang", "full", "s3error"} <= {f.kind for f in faults} and len(faults) == 12
    for kinds in (("full",), ("s3cut",)):
        config = chaos.Config(random=3, checkpoints="s3", kinds=kinds)
        assert len(chaos.cases(config, 60, 5)["3 random faults"]) == 3


@pytest.mark.parametrize(
    "config, said",
    [({"random": 60}, "--random 60 needs"), ({"random": 1, "kinds": ("nan",)}, "leave the weights alone"),
     ({"random": 1, "kinds": ("s3cut",)}, "--random 1 needs"), ({"random": -1}, "--random -1"),
     ({"checkpoints": "nfs"}, "local, tmpfs or s3, got 'nfs'")],
)  # fmt: skip
def test_random_faults_that_cannot_be_placed(config, said):
    with pytest.raises(ValueError, match=said):
        chaos.cases(chaos.Config(**config), 60, 5)


def test_the_table_goes_between_its_marks(tmp_path):
    page = tmp_path / "page.md"
    write_table(page, "first\n")
    assert page.read_text() == "first\n"
    with pytest.raises(ValueError, match="has no lines"):
        write_table(page, "second\n")
    page.write_text(f"# A page\n{BEGIN}\nold\n{END}\nmore\n")
    for _ in range(2):
        write_table(page, "| new |\n")
        assert page.read_text() == f"# A page\n{BEGIN}\n\n| new |\n\n{END}\nmore\n"


def test_a_kind_that_is_not_known():
    with pytest.raises(ValueError, match="--kinds must be of kill.*; got flood"):
        chaos.cases(chaos.Config(kinds=("kill", "flood")), 60, 5)


@pytest.mark.parametrize("command, said", [([], "give the command"), (["train_mmdit.py"], "needs --num_steps")])
def test_a_command_that_cannot_be_rehearsed(tmp_path, command, said):
    with pytest.raises(ValueError, match=said):
        chaos.main(chaos.Config(folder=str(tmp_path / "new")), command)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is not empty"):
        chaos.main(chaos.Config(folder=str(tmp_path)), ["train_mmdit.py", "--num_steps", "9"])


@pytest.mark.parametrize(
    "config, said",
    [({"kinds": ("kill",), "step": 12}, "kill: --step 12 must be 0 to 11: .* --num_steps 12"),
     ({"kinds": ("kill",), "step": -1}, "--step -1 must be 0 to 11"),
     ({"kinds": ("badsample",), "step": 11}, "badsample: --step 11 must be 0 to 10"),  # it strikes twice
     ({"kinds": ("full",), "save_step": 16}, "full: --save_step 16 .* up to its --num_steps 12"),
     ({"kinds": ("full",), "save_step": 0}, "--save_step 0 must be a multiple"),
     ({"kinds": ("full",), "save_step": 6}, "--save_step 6 must be a multiple of the command's --save_every 4")],
)  # fmt: skip
def test_a_fault_that_would_not_strike_is_refused(config, said):
    with pytest.raises(ValueError, match=said):
        chaos.cases(chaos.Config(**config), 12, 4)


def test_the_last_places_that_a_run_has():
    config = chaos.Config(kinds=("kill", "full", "spike"), step=11, save_step=12)
    assert [fault.step for (fault,) in chaos.cases(config, 12, 4).values()] == [11, 12, 36]
    chaos.cases(chaos.Config(kinds=("kill",), save_step=99), 12, 4)  # what no fault asks for may be anything
    with pytest.raises(ValueError, match="--save_every 0"):
        chaos.cases(chaos.Config(kinds=("full",)), 12, 0)


@pytest.mark.parametrize(
    "words", [["--num_steps", "12"], ["--num_steps=12"], ["--num-steps=12"], ["--num-steps", "9", "--num_steps", "12"]]
)
def test_flags_are_read_as_the_script_reads_them(tmp_path, words):
    launcher = Launcher(tmp_path / "new", ["train_mmdit.py", *words, "--lr", "0.1"], 2, 5.0, 60.0)
    assert launcher.number("--num_steps") == parse(Steps, args=[*words, "--lr", "0.1"]).num_steps == 12
    with pytest.raises(ValueError, match="needs --save_every"):
        launcher.number("--save_every")
    with pytest.raises(ValueError, match="needs --lr"):  # 0.1 is no number of steps
        launcher.number("--lr")


def test_a_table_that_cannot_be_written_is_noticed_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(Launcher, "run", lambda *_: pytest.fail("a run was started"))
    (tmp_path / "page.md").write_text("no marks\n")
    (tmp_path / "folder").mkdir()
    for table, said in (
        ("page.md", "has no lines"),
        ("folder", "cannot be written"),
        ("page.md/t", "cannot be written"),
    ):
        config = chaos.Config(folder=str(tmp_path / "new"), kinds=("kill",), table=str(tmp_path / table))
        with pytest.raises(ValueError, match=f"--table .*{said}"):
            chaos.main(config, ["train_mmdit.py", "--num_steps=12", "--save_every=4"])
    check_table(tmp_path / "there" / "table.md")
    assert not any((tmp_path / "there").iterdir()) and (tmp_path / "page.md").read_text() == "no marks\n"


@pytest.fixture
def outcome(tmp_path):
    """Return a function that makes what a run leaves behind."""

    def make(name, printed, **values):
        folder = tmp_path / name
        (folder / "struck").mkdir(parents=True)
        (folder / "printed.txt").write_text(printed)
        return Outcome(name, [], folder, **values)

    return make


def test_what_is_read_from_a_run(outcome):
    undisturbed = outcome("undisturbed", "", codes=[0], took_s=10.0)
    disturbed = outcome(
        "kill", "starting all ranks again, 3 restarts left\n", codes=[85, 0], took_s=31.0, ended_at=[101.5, 130.0],
        stepped_at=[90.0, 109.5, 140.0],
    )  # fmt: skip
    (disturbed.folder / "struck" / "kill@rank=1,step=6,phase=forward").write_text("100.0\n")
    disturbed.faults = parse_faults("kill@rank=1,step=6,phase=forward")
    cells = disturbed.cells(undisturbed)
    assert cells == ["1 × started again; 1 × saved, stopped, continued", "1.5", "8.0", "+21", "none"]
    table = markdown(undisturbed, [(disturbed, cells)], ["train_mmdit.py", "--num_steps", "9"], {"s3cut": "no store"})
    assert "`s3cut` was not rehearsed: no store." in table
    assert (
        "| kill: SIGKILL | 1, 6, forward | local disk | 1 × started again" in table
        and "train_mmdit.py --num_steps 9" in table
    )
    disturbed.codes = [83]
    assert "ended with 83 (too many restarts without progress)" in disturbed.what_happened()
    disturbed.faults = disturbed.faults * 2
    assert "1 did not strike" in disturbed.what_happened()
    assert outcome("slow", "", codes=[0]).cells(undisturbed)[:3] == ["went on", "—", "—"]
