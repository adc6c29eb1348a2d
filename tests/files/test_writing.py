"""Files and folders are whole or not there, take no place that is not theirs, and leave nothing behind."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tf_memsaver.errors import OutputError, OutputExistsError
from tf_memsaver.files import writing
from tf_memsaver.files.targets import Target, TargetKind, check_target
from tf_memsaver.files.writing import drop_unfinished, scratch_folder, written

PLAN = '{"schema_version": 1, "text": "%s"}'


@pytest.fixture(params=TargetKind, ids=lambda kind: kind.value)
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TargetKind]:
    yield request.param
    assert not writing._scratch
    assert not [path for path in tmp_path.iterdir() if path.name != "out"]


def target(folder: Path, kind: TargetKind, overwrite: bool = False) -> Target:
    return check_target(folder / "out", kind, overwrite=overwrite)


def fill(fresh: Path, text: str) -> None:
    """Write as much of a result as the rules ask for."""
    file = fresh / "plan.json" if fresh.is_dir() else fresh
    file.write_text(PLAN % text)


def write(place: Target, text: str, meanwhile: Callable[[], Any] = lambda: None) -> None:
    with written(place) as fresh:
        fill(fresh, text)
        meanwhile()


def text(folder: Path) -> str:
    out = folder / "out"
    return (out / "plan.json" if out.is_dir() else out).read_text()


def test_a_result_appears_when_it_is_whole(tmp_path: Path, kind: TargetKind) -> None:
    def check() -> None:
        assert not (tmp_path / "out").exists()

    write(target(tmp_path, kind), "new", check)
    assert text(tmp_path) == PLAN % "new"


def test_an_empty_folder_is_a_free_place(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write(target(tmp_path, TargetKind.FOLDER), "new")
    assert text(tmp_path) == PLAN % "new"


def test_a_result_replaces_an_older_one(tmp_path: Path, kind: TargetKind) -> None:
    write(target(tmp_path, kind), "old")
    write(target(tmp_path, kind, overwrite=True), "new")
    assert text(tmp_path) == PLAN % "new"


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "disk full"), KeyboardInterrupt("disk full")])
def test_a_failure_leaves_what_was_there(tmp_path: Path, kind: TargetKind, error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises((OutputError, KeyboardInterrupt), match="disk full"):
        write(target(tmp_path, kind), "new", fail)
    assert not list(tmp_path.iterdir())
    write(target(tmp_path, kind), "old")
    with pytest.raises((OutputError, KeyboardInterrupt), match="disk full"):
        write(target(tmp_path, kind, overwrite=True), "new", fail)
    assert text(tmp_path) == PLAN % "old"


def test_modes_are_those_of_open_and_mkdir(tmp_path: Path, kind: TargetKind) -> None:
    for mask in (0o022, 0o077, 0o002):
        before = os.umask(mask)
        try:
            write(target(tmp_path, kind), "new")
        finally:
            os.umask(before)
        full = 0o777 if kind is TargetKind.FOLDER else 0o666
        assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == full & ~mask
        shutil.rmtree(tmp_path / "out") if kind is TargetKind.FOLDER else (tmp_path / "out").unlink()


def test_a_file_that_is_replaced_keeps_its_mode(tmp_path: Path) -> None:
    write(target(tmp_path, TargetKind.FILE), "old")
    (tmp_path / "out").chmod(0o640)
    write(target(tmp_path, TargetKind.FILE, overwrite=True), "new")
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o640


# Two at once --------------------------------------------------------------------------------------------------------


def test_of_two_results_the_first_stays(tmp_path: Path, kind: TargetKind) -> None:
    for overwrite in (False, True):
        first, second = (target(tmp_path, kind, overwrite) for _ in range(2))
        with pytest.raises(OutputExistsError, match="in the meantime"):
            write(first, f"second {overwrite}", lambda: write(second, f"first {overwrite}"))  # noqa: B023
        assert text(tmp_path) == PLAN % f"first {overwrite}"


def test_what_was_added_in_the_meantime_is_kept(tmp_path: Path) -> None:
    write(target(tmp_path, TargetKind.FOLDER), "old")

    def add() -> None:
        (tmp_path / "out/thesis.txt").write_text("years of work")

    with pytest.raises(OutputExistsError, match="in the meantime"):
        write(target(tmp_path, TargetKind.FOLDER, overwrite=True), "new", add)
    assert text(tmp_path) == PLAN % "old" and (tmp_path / "out/thesis.txt").exists()


def test_what_goes_in_the_meantime_is_not_made_anew(tmp_path: Path, kind: TargetKind) -> None:
    write(target(tmp_path, kind), "old")

    def remove() -> None:
        shutil.rmtree(tmp_path / "out") if kind is TargetKind.FOLDER else (tmp_path / "out").unlink()

    with pytest.raises(OutputExistsError, match="in the meantime"):
        write(target(tmp_path, kind, overwrite=True), "new", remove)


@pytest.mark.parametrize("taken", [False, True])
def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: bool) -> None:
    def no_links(*_: Any) -> None:
        raise PermissionError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", no_links)
    place = target(tmp_path, TargetKind.FILE)
    if taken:
        (tmp_path / "out").write_text("mine")
        with pytest.raises(OutputExistsError):
            write(place, "new")
    else:
        write(place, "new")
    assert text(tmp_path) == ("mine" if taken else PLAN % "new")
    assert len(list(tmp_path.iterdir())) == 1


def failing_move(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], Any] = lambda: None) -> None:
    """Let the move of a new folder to its place fail."""
    rename = Path.rename

    def failing(self: Path, place: Path) -> Path:
        if self.name == "new":
            meanwhile()
            raise OSError(errno.EIO, "no")
        return rename(self, place)

    monkeypatch.setattr(Path, "rename", failing)


def test_a_failing_move_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(target(tmp_path, TargetKind.FOLDER), "old")
    failing_move(monkeypatch)
    with pytest.raises(OutputError, match="no"):
        write(target(tmp_path, TargetKind.FOLDER, overwrite=True), "new")
    assert text(tmp_path) == PLAN % "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_what_cannot_be_put_back_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(target(tmp_path, TargetKind.FOLDER), "old")
    failing_move(monkeypatch, lambda: write_mine(tmp_path / "out"))
    with pytest.raises(OutputExistsError, match="is kept in") as caught:
        write(target(tmp_path, TargetKind.FOLDER, overwrite=True), "new")
    assert (tmp_path / "out/mine").exists()
    (kept,) = (path for path in tmp_path.iterdir() if path.name != "out")
    assert str(kept) in caught.value.reason and (kept / "plan.json").read_text() == PLAN % "old"


def write_mine(folder: Path) -> None:
    folder.mkdir()
    (folder / "mine").write_text("mine")


# Private folders ----------------------------------------------------------------------------------------------------


def test_a_private_folder_is_private_and_goes(tmp_path: Path) -> None:
    with scratch_folder(tmp_path) as one, scratch_folder(tmp_path) as two:
        assert one != two and stat.S_IMODE(one.stat().st_mode) == 0o700
        (one / "text").write_text("x")
        drop_unfinished()
        assert not list(tmp_path.iterdir())
    assert not writing._scratch


def test_an_error_inside_names_the_target(tmp_path: Path) -> None:
    with pytest.raises(OutputError) as caught, written(target(tmp_path, TargetKind.FOLDER)) as fresh:
        raise OutputError(str(fresh / "saved_model"), "disk full")
    assert caught.value.path == str(tmp_path / "out") and caught.value.reason == "disk full"
