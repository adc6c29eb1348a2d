"""``tf-memsaver doctor``: a script runs up to its first ``fit``, nothing is trained, and the line to add is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import keras
import pytest

from tf_memsaver import cli

HEAD = """
import pathlib, sys
import keras, numpy as np, tensorflow as tf

def build(kind=keras.Model):
    x = inputs = keras.Input((16, 16, 3))
    for number in range(6):
        x = keras.layers.ReLU()(keras.layers.Conv2D(8, 3, padding="same", name=f"conv{number}")(x))
    outputs = keras.layers.Dense(4, name="classes")(keras.layers.GlobalAveragePooling2D()(x))
    made = kind(inputs, outputs, name="small")
    made.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return made

images, labels = np.zeros((20, 16, 16, 3), "float32"), np.zeros(20, "int32")
train = tf.data.Dataset.from_tensor_slices((images, labels)).batch(8)
print("text of the user's own")
"""


@pytest.fixture
def doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """Run ``doctor`` on a script of these lines; return exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    before, argv, path = vars(keras.Model).get("fit"), [*sys.argv], [*sys.path]

    def call(body: str, *arguments: str, head: str = HEAD) -> tuple[int, str, str]:
        (tmp_path / "train.py").write_text(head + body)
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main(["tf-memsaver", "doctor", "train.py", *arguments])
        captured = capfd.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    yield call
    assert vars(keras.Model).get("fit") is before and sys.argv == argv and sys.path == path
    assert [each.name for each in tmp_path.iterdir()] == ["train.py"]


SCRIPT = """
net = build()
try:
    net.fit(train, epochs=int(sys.argv[1]))
finally:
    print(int(net.optimizer.iterations), "steps")
pathlib.Path("weights").touch()
"""


def test_the_plan_and_the_line_to_add(doctor: Any) -> None:
    code, out, err = doctor(SCRIPT, "--", "7")
    assert code == 0, err
    assert "peak planned" in out and "small, batch size 8: one training step" in out
    line = 4 + len(HEAD.splitlines())
    assert f"before train.py:{line}" in out and "net = tf_memsaver.optimize(net, data=train)\n" in out
    assert "text of the user's own" in err and "0 steps" in err


def test_limits_are_in_the_line(doctor: Any) -> None:
    code, out, err = doctor(SCRIPT, "--budget=90%", "--keep=conv0", "--format=json", "--", "7")
    assert code == 0, err
    found = json.loads(out)
    assert found["add"] == 'net = tf_memsaver.optimize(net, data=train, budget="90%", keep=["conv0"])'
    assert found["variable"] == "net" and found["plan"]["batch_size"] == 8
    assert found["plan"]["request"]["keep"] == ["conv0"]


@pytest.mark.parametrize(
    ("call", "batch_size", "line"),
    [
        ("model.fit(images, labels)", 20, "model = tf_memsaver.optimize(model, data=(images, labels), batch_size=20)"),
        ("a_model = build(); a_model.fit(images, labels)", 20, "    data=(images, labels),\n    batch_size=20,\n)"),
        ("n = build(); n.fit(y=labels, x=images, batch_size=4)", 4, "n, data=(images, labels), batch_size=4)"),
        ("model.fit(iter(train))", 8, "model = tf_memsaver.optimize(model, data=iter(train))"),
        ("build().fit(train)", 8, "model = tf_memsaver.optimize(model, data=train)"),
        ("model.fit(*(train,))", 8, "model = tf_memsaver.optimize(model, data=...)"),
    ],
)
def test_what_fit_is_given(doctor: Any, call: str, batch_size: int, line: str) -> None:
    code, out, err = doctor(f"model = build()\n{call}\n", "--format=json")
    assert code == 0, err
    found = json.loads(out)
    assert found["plan"]["batch_size"] == batch_size and line in found["add"]


def test_a_model_without_a_name_is_to_get_one(doctor: Any) -> None:
    code, out, err = doctor("build().fit(train)\n")
    assert code == 0, err
    said = " ".join(out.split())
    assert "Name it (model = ...), and call model.fit. Add this line between, and `import tf_memsaver` at" in said
    assert said.endswith("model = tf_memsaver.optimize(model, data=train)")


def test_a_fit_of_the_users_own_and_a_preprocessor(doctor: Any) -> None:
    body = """
class Own(keras.Model):
    preprocessor = "a KerasHub task's"

    def preprocess_samples(self, x, y=None, sample_weight=None):
        raise RuntimeError("it has been through it already")

    def fit(self, data):
        return super().fit(data, epochs=2)

class Trainer:
    def __init__(self):
        self.model = build(Own)

    def run(self):
        self.model.fit(train)

Trainer().run()
"""
    code, out, err = doctor(body)
    assert code == 0, err
    assert "self.model = tf_memsaver.optimize(self.model, data=train)" in out


def test_a_script_that_catches_all_trains_nothing(doctor: Any) -> None:
    body = """
model = build()
for _ in range(2):
    try:
        model.fit(train)
    except:
        print("caught")
assert not int(model.optimizer.iterations)
"""
    code, out, err = doctor(body)
    assert code == 0 and "peak planned" in out and err.count("caught") == 2


def test_a_budget_that_nothing_fits_is_1(doctor: Any) -> None:
    body = "model = build()\ntry:\n    model.fit(train)\nexcept Exception:\n    pass\n"
    code, out, err = doctor(body, "--budget=1KiB")
    assert code == 1 and not out and "no plan fits" in err.splitlines()[-1]


OWN_LOOP = """
net, optimizer = build(), keras.optimizers.Adam()

@tf.function
def step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(net(x, training=True))
    optimizer.apply_gradients(zip(tape.gradient(loss, net.trainable_variables), net.trainable_variables))

for x, y in train:
    step(x, y)
pathlib.Path("weights").touch()
"""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("build()\n", "without a call of fit on a keras.Model"),
        ("build().train_on_batch(images, labels)\n", "not in fit"),
        (OWN_LOOP, "step=train_step"),
        ("sys.exit(3)\n", "ended by sys.exit(3) before it called fit"),
        ("build().fit(train, epoch=1)\n", "failed before it called fit (TypeError)"),
    ],
)
def test_scripts_that_reach_no_fit(doctor: Any, body: str, said: str) -> None:
    code, out, err = doctor(body)
    assert code == 2 and not out and said in err.splitlines()[-1]


def test_a_script_that_fails_shows_its_own_traceback(doctor: Any) -> None:
    code, out, err = doctor("def load():\n    raise OSError('no images')\n\nload()\n", head="")
    assert code == 2 and not out
    *_, traceback, end = err.partition("Traceback")
    assert end.splitlines()[1].strip().startswith('File "train.py", line 4'), traceback
    assert "OSError: no images" in end and "runpy" not in end
    assert "'train.py' failed before it called fit (OSError); its traceback is above." in end.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("doctor", "trian.py"), "there is no script 'trian.py'. Did you mean train.py?"),
        (("doctor", "train.py"), "'train.py' cannot be run, line 1: "),
        (("doctor", "train.py", "8"), "'8' is one argument too many. A script's own arguments go after --"),
        (("doctor",), "no SCRIPT was given"),
        (("plan", "resnet50", "--", "8"), "'8' is one argument too many"),
    ],
)
def test_bad_command_lines_are_told_before_anything_runs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import keras import\n")
    with pytest.raises(SystemExit) as ended:
        cli.main(["tf-memsaver", *arguments])
    assert ended.value.code == 2 and said in capsys.readouterr().err
