"""The rehearsal of faults: what it plans, and a table of two runs that were really disturbed."""

import pytest

from tools import chaos
from tools.chaos_report import Outcome, markdown
from utils.fault_injection import KINDS, parse_faults


def test_each_kind_gets_a_run_and_saves_are_disturbed_at_a_save():
    planned = chaos.cases(chaos.Config(ranks=4), 60, 5)
    assert list(planned) == list(chaos.CASES) and set(planned) <= set(KINDS)
    for kind, (fault,) in planned.items():
        assert fault.kind == kind and fault.rank == 3 and fault.step == (8 if fault.phase == "checkpoint" else 6)
        assert parse_faults(fault.name) == [fault]


def test_random_faults_are_the_same_for_a_seed_and_leave_the_weights_alone():
    config = chaos.Config(random=12, seed=3)
    (faults,) = chaos.cases(config, 60, 5).values()
    assert len(faults) == 12 and chaos.cases(config, 60, 5) == {"12 random faults": faults}
    assert chaos.cases(chaos.Config(random=12, seed=4), 60, 5) != {"12 random faults": faults}
    assert all(f.kind != "nan" and 0 < f.step < 60 for f in faults)
    assert all(f.step % 5 == 0 for f in faults if f.phase == "checkpoint")


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
    table = markdown(undisturbed, [disturbed], ["train_mmdit.py", "--num_steps", "9"])
    assert "| kill: SIGKILL | 1, 6, forward | 1 × started again" in table and "train_mmdit.py --num_steps 9" in table
    disturbed.codes = [83]
    assert "ended with 83 (too many restarts without progress)" in disturbed.what_happened()
    assert outcome("slow", "", codes=[0]).cells(undisturbed)[:3] == ["went on", "—", "—"]
