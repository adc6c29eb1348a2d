"""The check of a GPU: what is trained, in which order and for how long, and a reduced run of it."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tools.examples.running import Outcome
from tools.gpu import check
from tools.gpu.trained import MODES, PLAIN, TRAINED, VARIANTS, Checked
from tools.gpu.turns import TakesTurns
from tools.shared.processes import run_module

ALL = check.cells(list(TRAINED), MODES, VARIANTS, reduced=True)


def an_outcome(last: float = 1.0) -> Outcome:
    return Outcome(losses={"loss": [2.0, last]}, variables=[np.ones(3, np.float32), np.full(2, last, np.float32)])


def test_everything_is_trained_once_and_the_plain_step_first() -> None:
    assert len(set(ALL)) == len(ALL) == len(TRAINED) * len(MODES) * len(VARIANTS)
    for checked in ALL:
        assert ALL.index(checked._replace(variant=PLAIN)) <= ALL.index(checked)
    some = check.cells(["BERT-base"], ["xla"], ["sqrt", PLAIN], reduced=False)
    assert [(each.mode, each.variant) for each in some] == [("xla", PLAIN), ("xla", "sqrt")]


def test_what_fails_is_told_and_stops_nothing() -> None:
    def run(checked: Checked, seconds: float) -> tuple[dict[str, Any], Any]:
        assert 0 < seconds <= check.CELL_SHARE * 1000.0
        if checked.variant == "ours":
            raise TimeoutError("it took more than 170 seconds")
        if checked.variant == "sqrt":
            return {"predicted_bytes": 7, "error": "ResourceExhaustedError: none left"}, None
        return {"predicted_bytes": 7}, an_outcome()

    rows = list(check.rows_of(ALL, 1000.0, run))
    assert len(rows) == len(ALL)
    for row in rows:
        wrong = {"ours": "TimeoutError: it took more than 170 seconds", "sqrt": "ResourceExhaustedError: none left"}
        assert row.get("error") == wrong.get(row["variant"])
        assert ("step_seconds" in row) == ("parity" in row or row["variant"] == PLAIN) == ("error" not in row)
    assert "none left" in check.table(rows) and json.loads(json.dumps(rows)) == rows


def test_what_there_is_no_time_for_says_so() -> None:
    rows = list(check.rows_of(ALL, check.LEAST_SECONDS / 2, lambda checked, seconds: pytest.fail("it is over")))
    assert len(rows) == len(ALL) and all(row["error"].startswith("not run:") for row in rows)


def test_several_at_a_time_are_compared_with_their_plain_step() -> None:
    side_by_side = threading.Barrier(4, timeout=60.0)

    def run(checked: Checked, seconds: float) -> tuple[dict[str, Any], Any]:
        if checked in ALL[:4]:
            side_by_side.wait()
        time.sleep(0.02 if checked.variant == PLAIN else 0.001)
        return {}, an_outcome()

    rows = list(check.rows_of(ALL, 1000.0, run, jobs=4))
    assert len(rows) == len(ALL) and not any("error" in row for row in rows)
    assert all(("parity" in row) == (row["variant"] != PLAIN) for row in rows)
    assert check.jobs_on({"bytes_left": 75 << 30}) == max(1, min(4, (os.cpu_count() or 1) // check.JOB_CORES))
    assert check.jobs_on({"bytes_left": 8 << 30}) == check.jobs_on({"bytes_left": 0}) == 1


def test_steps_behind_the_first_take_turns(tmp_path: Path) -> None:
    first, second = (TakesTurns(str(tmp_path / "turns")) for _ in range(2))
    entered = threading.Event()

    def steps() -> None:
        second.on_train_batch_begin(0)
        second.on_train_batch_begin(1)
        entered.set()

    for step in range(2):
        first.on_train_batch_begin(step)
    other = threading.Thread(target=steps)
    other.start()
    assert not entered.wait(0.2)
    first.on_train_end()
    assert entered.wait(60.0)
    other.join()
    second.on_train_end()


def test_parity_says_how_much_differs() -> None:
    same = check.parity(an_outcome(), an_outcome())
    assert same == {
        "identical": True,
        "variables": 2,
        "variables_identical": 2,
        "largest_ulps": 0.0,
        "largest_loss_difference": 0.0,
    }
    near = check.parity(an_outcome(), an_outcome(1.0 + 2**-23))
    assert not near["identical"] and near["variables_identical"] == 1
    assert near["largest_ulps"] == 1.0 and near["largest_loss_difference"] == 2**-23
    none = check.parity(an_outcome(), an_outcome(float("nan")))
    assert not none["identical"] and none["largest_ulps"] is None


@pytest.mark.long
def test_a_reduced_run(tmp_path: Path) -> None:
    output = tmp_path / "check.json"
    # What it may take is not what is tested here: the machine may be busy.
    wanted = ("--reduced", "--models=BERT-base", f"--variants={PLAIN},ours", "--minutes=60")
    done = run_module("tools.gpu.check", *wanted, f"--output={output}")
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text(encoding="utf-8"))
    assert found["reduced"] and "tensorflow" in found["machine"] and "gpus" in found["device"]
    assert ("There is no GPU" in done.stdout) == (not found["device"]["gpus"])
    rows = {(row["mode"], row["variant"]): row for row in found["rows"]}
    assert len(rows) == 4 and not any("error" in row for row in rows.values()), rows
    for (mode, variant), row in rows.items():
        assert 0 < row["measured_bytes"] <= row["measured_with_first_step_bytes"] and row["predicted_bytes"] > 0
        assert (row["compiled_bytes"] is not None) == (mode == "xla")
        assert ("parity" in row) == (variant == "ours")
    assert rows["graph", "ours"]["parity"]["identical"]
    assert rows["graph", "ours"]["measured_bytes"] < rows["graph", PLAIN]["measured_bytes"]
