"""The loss curve: every point where it belongs, in a terminal of plain characters and in the picture."""

import json
import math
import sys
import xml.etree.ElementTree as ET

import paths  # noqa: F401  finds the chapters below
import curve
import pytest
from data import load_corpus
from options import Config
from test_train import TEXT

# Falls from 5 to 1 in eleven steps; validated at the start and at the end.
LOG = [{"step": 0, "val_loss": 5.0}]
LOG += [{"step": step, "loss": 5.0 - 0.4 * step} for step in range(1, 11)]
LOG += [{"step": 10, "val_loss": 1.0}]


def test_in_the_terminal_each_loss_is_in_its_column_and_its_row():
    drawn = curve.in_terminal(LOG, width=11, height=9).splitlines()  # a column is a step, a row is half a nat
    assert drawn[0] == "  5.000 |o" and drawn[8] == "  1.000 |          o"  # over the dot of step 10
    assert drawn[7] == "        |         ."  # 1.4 is nearer to 1.5 than to 1.0
    assert drawn[4] == "        |     ."  # step 5: 3.0
    assert drawn[9] == "        +" + "-" * 11 and drawn[10] == "         0   step 10"
    assert all(line.isascii() for line in drawn)
    late = [{"step": step, "loss": 5.0} for step in (1_234_567, 7_654_321)]
    assert "1234567" + "step 7654321".rjust(65) in curve.in_terminal(late)


def test_the_picture_has_every_point_where_the_axes_say_it_is():
    picture = ET.fromstring(curve.as_svg(LOG, 'a "run" <1>', width=372, height=168))  # 300 x 100 for the curve
    name = "{http://www.w3.org/2000/svg}"
    line = picture.find(f"{name}polyline").get("points").split()
    assert line == [f"{56 + 30.0 * step},{round(34 + 10.0 * step, 1)}" for step in range(1, 11)]
    dots = [(float(c.get("cx")), float(c.get("cy"))) for c in picture.iter(f"{name}circle")]
    assert dots == [(56.0, 34.0), (356.0, 134.0)]
    assert picture.get("aria-label") == 'a "run" <1>: loss from 5.000 to 1.000 nats per token in 10 steps'
    said = [(text.get("y"), text.text) for text in picture.iter(f"{name}text")]
    assert said[1:5] == [("38", "5.00"), ("134", "1.00"), ("156", "0"), ("156", "step 10")]
    falling = [{"step": step, "loss": 5.0 - step} for step in (1, 2)]
    assert "loss from 4.000 to 3.000 nats" in curve.as_svg(falling, "run"), "of a run without a validation"
    validated = [{"step": 2, "val_loss": 3.5}]
    assert "loss from 4.000 to 3.500 nats" in curve.as_svg([*falling, *validated], "run"), "the last validation"


def test_a_loss_that_is_not_finite_and_a_log_of_one_line_can_be_drawn():
    few = [{"step": 3, "loss": 2.0}]
    assert curve.in_terminal([*few, {"step": 4, "loss": math.nan}]) == curve.in_terminal(few)
    assert "2.000 |." in curve.in_terminal(few) and "nan" not in curve.as_svg(few, "run")
    assert ">3</text>" in curve.as_svg(few, "run") and ">step 4</text>" in curve.as_svg(few, "run")
    assert 'points="56.0,326.0"' in curve.as_svg(few, "run"), "the axis begins at the first step"
    assert curve.in_terminal([]) == "no loss to draw" and curve.as_svg([], "run") == ""
    assert "5.000 |o" in curve.in_terminal(LOG[:1]) and "<circle" in curve.as_svg(LOG[:1], "run")


def test_the_command_draws_the_log_of_a_run_whose_last_line_is_half_written(tmp_path, monkeypatch, capsys):
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LOG) + '{"step": 11, "lo')
    monkeypatch.setattr(sys, "argv", ["curve.py", str(tmp_path)])
    curve.main()
    assert capsys.readouterr().out == curve.in_terminal(LOG) + "\n"
    assert (tmp_path / "loss.svg").read_text() == curve.as_svg(LOG, tmp_path.name)
    (tmp_path / "loss.svg").unlink()
    (tmp_path / "loss.svg").mkdir()
    with pytest.raises(SystemExit, match="2"):
        curve.main()
    assert capsys.readouterr().err == f"curve.py: {tmp_path}/loss.svg cannot be written (Is a directory)\n"
    (tmp_path / "log.jsonl").unlink()
    with pytest.raises(SystemExit, match="2"):
        curve.main()
    assert capsys.readouterr().err == f"curve.py: {tmp_path} holds no log.jsonl; give the folder of a run\n"


def test_bits_per_byte_are_known_for_text_and_not_for_tokens_of_a_stranger(tmp_path):
    assert curve.bits_per_byte(math.log(2), 1.0) == 1.0
    assert curve.bits_per_byte(4 * math.log(2), 0.25) == pytest.approx(1.0)  # tokens of four bytes
    (tmp_path / "numbers.txt").write_text(TEXT)
    assert load_corpus(Config(data=str(tmp_path / "numbers.txt"), seq_len=16)).tokens_per_byte == 1.0
    (tmp_path / "ids.bin").write_bytes(bytes(4000))
    assert load_corpus(Config(data=str(tmp_path / "ids.bin"), seq_len=16, vocab_size=300)).tokens_per_byte is None
