from __future__ import annotations

from pathlib import Path

import pytest

from tf_memsaver.files import written_beside


def write(target: Path, text: str) -> None:
    with written_beside(target) as fresh:
        (fresh / "text").write_text(text)


def test_a_folder_appears_when_it_is_whole(tmp_path: Path) -> None:
    with written_beside(tmp_path / "out") as fresh:
        assert not (tmp_path / "out").exists()
        (fresh / "text").write_text("new")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out/text").read_text() == "new"


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    def fail_half_way() -> None:
        with written_beside(tmp_path / "out") as fresh:
            (fresh / "text").write_text("half")
            raise OSError("disk full")

    write(tmp_path / "out", "old")
    with pytest.raises(OSError, match="disk full"):
        fail_half_way()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out/text").read_text() == "old"


def test_a_failing_move_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "out", "old")
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if ".part-" in self.name and not self.name.endswith("-old"):
            raise OSError("no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="no"):
        write(tmp_path / "out", "new")
    assert (tmp_path / "out/text").read_text() == "old"


def test_a_file_or_a_folder_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    write(tmp_path / "out", "first")
    write(tmp_path / "out", "second")
    assert (tmp_path / "out/text").read_text() == "second"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
