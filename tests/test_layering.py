"""Rules that keep the tree readable and safe, checked on its syntax trees."""

import ast
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
FOLDERS = ("model", "parallel", "data", "utils", "tools", "benchmarks", "tests")
SCRIPTS = sorted(path.stem for path in REPOSITORY.glob("*.py"))
OURS = {*FOLDERS, *SCRIPTS}
# What each folder may import of ours; the others may import everything but tests.
MAY_IMPORT = {
    "model": {"model"},
    "parallel": {"parallel", "utils"},
    "data": {"data", "utils"},
    "utils": {"utils"},
}
MODEL_LIBRARIES = {"torch", "diffusers", "transformers", "tokenizers", "safetensors", "numpy"}
SOURCES = sorted(
    path.relative_to(REPOSITORY)
    for folder in (*FOLDERS, ".")
    for path in (REPOSITORY.glob("*.py") if folder == "." else (REPOSITORY / folder).rglob("*.py"))
)
NOT_TESTS = [path for path in SOURCES if path.parts[0] != "tests"]


def tree(path):
    return ast.parse((REPOSITORY / path).read_text(encoding="utf-8"), filename=str(path))


def imports(path):
    """Return {top-level name of an imported module: line}."""
    found = {}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found.update({alias.name.split(".")[0]: node.lineno for alias in node.names})
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            found[node.module.split(".")[0]] = node.lineno
    return found


def calls(path):
    return [node for node in ast.walk(tree(path)) if isinstance(node, ast.Call)]


def test_the_rules_see_the_tree():
    assert Path("model/mmdit.py") in SOURCES and Path("train_mmdit.py") in SOURCES and "train_mmdit" in OURS
    assert "torch" in imports(Path("model/mmdit.py")) and "parallel" in imports(Path("train_mmdit.py"))


@pytest.mark.parametrize("path", NOT_TESTS, ids=str)
def test_imports_go_one_way(path):
    allowed = MAY_IMPORT.get(path.parts[0], OURS - {"tests"})
    wrong = {name: line for name, line in imports(path).items() if name in OURS and name not in allowed}
    assert not wrong, f"{path} imports {wrong} (name: line); {path.parts[0]} may import {sorted(allowed)}"


@pytest.mark.parametrize("path", [p for p in SOURCES if p.parts[0] == "model"], ids=str)
def test_the_model_needs_only_model_libraries(path):
    wrong = imports(path).keys() - MODEL_LIBRARIES - sys.stdlib_module_names - {"model"}
    assert not wrong, f"{path} imports {sorted(wrong)}"
    # It knows no rank and no mesh.
    source = (REPOSITORY / path).read_text(encoding="utf-8")
    assert "torch.distributed" not in source, f"{path} uses torch.distributed; that belongs to parallel/"


@pytest.mark.parametrize("path", [p for p in SOURCES if p.parts[0].startswith("train_")], ids=str)
def test_a_train_script_is_read_in_one_sitting(path):
    lines = (REPOSITORY / path).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 400, f"{path} has {len(lines)} lines, at most 400"


def test_every_folder_is_a_package():
    # Without __init__.py an installed package called utils or data would win.
    missing = [
        folder for folder in {path.parent for path in SOURCES} if not (REPOSITORY / folder / "__init__.py").exists()
    ]
    assert set(missing) <= {Path(".")}


def test_no_file_for_whatever_did_not_fit_elsewhere():
    assert [path for path in NOT_TESTS if path.stem in ("common", "helpers", "helper", "misc", "util", "utils")] == []


@pytest.mark.parametrize("path", NOT_TESTS, ids=str)
def test_no_file_runs_code_it_was_given(path):
    assert not imports(path).keys() & {"pickle", "dill", "cloudpickle", "shelve", "marshal"}, f"{path} imports a pickle"
    for call in calls(path):
        name, keywords = ast.unparse(call.func), {k.arg: ast.unparse(k.value) for k in call.keywords}
        where = f"{path}:{call.lineno}"
        assert name not in ("eval", "exec", "os.system"), f"{where} calls {name}"
        assert keywords.get("shell") != "True", f"{where}: shell=True"
        assert keywords.get("trust_remote_code", "False") == "False", f"{where}: trust_remote_code"
        if name == "torch.load":
            assert keywords.get("weights_only") == "True", f"{where}: torch.load without weights_only=True"
        if name in ("np.load", "numpy.load"):
            assert keywords.get("allow_pickle", "False") == "False", f"{where}: allow_pickle"


@pytest.mark.parametrize("path", NOT_TESTS, ids=str)
def test_the_environment_is_read_by_name(path):
    # Printed, logged or saved as a whole it would carry tokens and keys along.
    by_name = (ast.Attribute, ast.Subscript, ast.Compare)  # os.environ.get("X"), os.environ["X"], "X" in os.environ
    for parent in ast.walk(tree(path)):
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "os.environ":
                assert isinstance(parent, by_name), f"{path}:{node.lineno} uses the environment as a whole"
