"""What may be written to, and what may be replaced there."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from tf_memsaver.errors import InvalidRequestError, OutputError, OutputExistsError
from tf_memsaver.files.targets import TargetKind, check_target

PLAN = '{\n "schema_version": 1}'
FILE, FOLDER = TargetKind.FILE, TargetKind.FOLDER


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a SavedModel, an output of the command, and links to both."""
    home = tmp_path / "home"
    here = home / "project"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(home))
    saved_model(here / "saved")
    optimized(here / "out")
    (here / "link").symlink_to("saved")
    (here / "loop").symlink_to("loop")
    (here / "up").symlink_to("..")
    return here


def saved_model(folder: Path) -> None:
    for name in (
        "saved_model.pb",
        "fingerprint.pb",
        "variables/variables.index",
        "variables/variables.data-00000-of-00001",
        "assets/words.txt",
        "assets.extra/memsaver_plan.json",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")


def optimized(folder: Path, config: str = "tf_memsaver>OptimizedModel") -> None:
    saved_model(folder / "saved_model")
    (folder / "plan.json").write_text(PLAN)
    with zipfile.ZipFile(folder / "model.keras", "w") as archive:
        archive.writestr("config.json", config)


# Places that are never a target -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TargetKind)
@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("", "empty"),
        (" ", "empty"),
        (None, "None"),
        (7, "7"),
        ("/", "root"),
        ("//", "root"),
        (".", "working"),
        ("./", "working"),
        ("..", "working"),
        ("../..", "working"),
        ("saved/..", "working"),
        ("up/project", "working"),
        ("up/.", "working"),
        ("../project", "working"),
        ("/proc", "mount point"),
        ("~", "'~'"),
        ("~/out", "'~'"),
        ("missing/out", "does not exist"),
        ("out/plan.json/out", "is not a folder"),
        ("loop/out", "is not a folder"),
        ("nul\0l", "null"),
        ("x" * 300, "too long"),
    ],
)
def test_never_a_target(here: Path, path: str, says: str, kind: TargetKind) -> None:
    if kind is FILE and str(path).endswith("/") and says != "empty":
        says = "like the path of a folder"
    for overwrite in (False, True):
        with pytest.raises(InvalidRequestError, match=says):
            check_target(path, kind, overwrite=overwrite)
    for each in (os.fspath(here), here, here.parent, here.parents[1], f"{here}/"):
        with pytest.raises(InvalidRequestError):
            check_target(each, kind, overwrite=True)


@pytest.mark.parametrize("path", ["saved", "saved/", "./saved", "saved/out", "up/project/saved", "saved/variables"])
def test_the_source_what_holds_it_and_what_it_holds(here: Path, path: str) -> None:
    for source in ("saved", "saved/", here / "saved", "link", "link/"):
        with pytest.raises(InvalidRequestError, match="source"):
            check_target(path, FOLDER, overwrite=True, sources=[source])
    with pytest.raises(InvalidRequestError, match="source"):
        check_target("out", FOLDER, overwrite=True, sources=["out/model.keras"])
    assert check_target("out", FOLDER, overwrite=True, sources=["resnet50", "models:build", ""]).replaced


def test_a_user_without_a_home_and_a_folder_that_is_gone(
    tmp_path: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert check_target("new", FOLDER, overwrite=False).path == here / "new"
    (here / "gone").mkdir()
    monkeypatch.chdir(here / "gone")
    (here / "gone").rmdir()
    assert check_target(tmp_path / "new", FILE, overwrite=False).path == tmp_path / "new"
    with pytest.raises(InvalidRequestError):
        check_target("new", FOLDER, overwrite=False)


def test_a_folder_that_is_read_only(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != here)
    for kind in TargetKind:
        with pytest.raises(OutputError, match="not writable"):
            check_target("new", kind, overwrite=True)


# What may be replaced -----------------------------------------------------------------------------------------------


def test_what_is_free_or_ours(here: Path) -> None:
    (here / "empty").mkdir()
    (here / "plan.json").write_text(PLAN)
    (here / "zero").write_text("")
    for path, kind in (("new", FOLDER), ("new/", FOLDER), ("new", FILE), ("empty", FOLDER), ("empty/", FOLDER)):
        assert check_target(path, kind, overwrite=False).replaced is None
    for path, kind in (("saved", FOLDER), ("out/", FOLDER), ("plan.json", FILE), ("zero", FILE)):
        assert check_target(path, kind, overwrite=True).replaced
        with pytest.raises(OutputExistsError, match="overwrite=True"):
            check_target(path, kind, overwrite=False)


@pytest.mark.parametrize(
    "mine",
    [
        "out/thesis.txt",
        "out/.git/HEAD",
        "out/saved_model/thesis.txt",
        "out/saved_model/variables/thesis.txt",
        "out/saved_model/variables/more/variables.index",
        "saved/plan.json",
        "saved/assets.extra/tf_serving_warmup_requests",
        "saved/assets/more/words.txt",
        "saved/assets.extra/memsaver_plan.json/thesis.txt",
    ],
)
def test_a_folder_with_something_that_we_do_not_write(here: Path, mine: str) -> None:
    folder = here / mine.split("/")[0]
    if (here / mine).parent.is_file():
        (here / mine).parent.unlink()
    (here / mine).parent.mkdir(exist_ok=True, parents=True)
    (here / mine).write_text(PLAN)
    with pytest.raises(OutputExistsError) as caught:
        check_target(folder, FOLDER, overwrite=True)
    named = [part for part in mine.split("/")[1:] if part in str(caught.value)]
    assert named and "does not write" in caught.value.reason


def test_projects_with_names_like_ours(here: Path) -> None:
    """A plan file among other work, as README makes one; a trained model with our name; assets without a model."""
    project, trained, web, files = (here / name for name in ("project", "trained", "web", "files"))
    project.mkdir()
    (project / "plan.json").write_text(PLAN)
    (project / "train.py").write_text("x")
    optimized(trained, config="a model of the user's own")
    (web / "assets").mkdir(parents=True)
    (web / "assets/logo.png").write_text("x")
    for number in range(9):
        (files / f"file{number}").mkdir(parents=True)
    for folder, named in (
        (project, "'train.py'"),
        (trained, "'model.keras'"),
        (web, "'assets'"),
        (files, "'file2' and 6 more"),
    ):
        with pytest.raises(OutputExistsError, match=named):
            check_target(folder, FOLDER, overwrite=True)


def test_kinds_are_not_mixed_and_links_and_devices_stay(here: Path) -> None:
    (here / "plan.json").write_text(PLAN)
    (here / "thesis.txt").write_text("years of work")
    (here / "inner").symlink_to("plan.json")
    (here / "dangling").symlink_to("nowhere")
    os.mkfifo(here / "pipe")
    for path, kind in (
        ("plan.json", FOLDER),
        ("out", FILE),
        ("thesis.txt", FILE),
        ("out/model.keras", FILE),
        ("link", FOLDER),
        ("link/", FOLDER),
        ("inner", FILE),
        ("dangling", FILE),
        ("dangling", FOLDER),
        ("pipe", FILE),
        ("/dev/null", FILE),
        ("/dev/null", FOLDER),
    ):
        with pytest.raises(OutputExistsError, match="not replaced"):
            check_target(path, kind, overwrite=True)
    (here / "out/plan.json").unlink()
    (here / "out/plan.json").symlink_to("../plan.json")
    with pytest.raises(OutputExistsError, match=r"'plan\.json'"):
        check_target("out", FOLDER, overwrite=True)
