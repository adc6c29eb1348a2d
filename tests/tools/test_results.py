"""A benchmark's file keeps the rows that are not measured again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.shared.results import KeptRows


def kept(path: Path) -> KeptRows:
    def table(rows: Any) -> str:
        return "\n".join(["| name |", "|---|", *(f"| {row['name']} {row['bytes']} |" for row in rows)])

    return KeptRows(path, "Rows", ["name"], lambda rows: [f"- {len(rows)} rows"], table)


def test_rows_take_the_place_of_those_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    kept(path).add([{"name": "b", "bytes": 1}, {"name": "c", "bytes": 2}])
    kept(path).add([{"name": "b", "bytes": 3}, {"name": "a", "bytes": 4}], lambda row: row["name"])
    found = json.loads(path.read_text())["rows"]
    assert [(row["name"], row["bytes"]) for row in found] == [("a", 4), ("b", 3), ("c", 2)]
    text = path.with_suffix(".md").read_text()
    assert text.startswith("# Rows\n")
    assert "- 3 rows\n\n| name |" in text
    assert capsys.readouterr().out.splitlines() == ["| b 1 |", "| c 2 |", "| b 3 |", "| a 4 |"]


def test_rows_of_several_machines_name_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    for cpu, names in (("first", "ab"), ("second", "b"), ("second", "c"), ("third", "d")):
        monkeypatch.setattr("tools.shared.results.machine", lambda cpu=cpu: {"cpu": cpu})
        kept(path).add([{"name": name, "bytes": 1} for name in names])
    found = json.loads(path.read_text())
    assert [found["machines"][row["on"]]["cpu"] for row in found["rows"]] == ["first", "second", "second", "third"]
    assert '- Machine of 2 rows: `{"cpu": "second"}`' in path.with_suffix(".md").read_text()
    kept(path).add([{"name": name, "bytes": 2} for name in "abc"])
    found = json.loads(path.read_text())
    assert "machines" not in found and found["machine"] == {"cpu": "third"}
    assert not any("on" in row for row in found["rows"])
    kept(path).print_summary()
    assert capsys.readouterr().out.endswith("- 4 rows\n")
