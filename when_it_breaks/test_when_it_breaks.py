"""Each script fails as it promises, says where, and passes when it is fixed."""

import contextlib
import io
import math
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import hangs
import losses_differ
import not_a_number
import out_of_memory
import pytest
import slow
import torch
from harness.ranks import run_ranks
from torch import Tensor

HERE = Path(__file__).parent
WHAT = {  # script, cause -> what it says, as a pattern over its whole output
    ("hangs", "branch"): r"rank 0 waits at line \d+, in train: dist.all_gather(.|\n)*last gloo:all_gather",
    ("hangs", "batches"): r"rank \d waits at line \d+, in (train: dist.barrier|<lambda>: lambda weight)",
    ("hangs", "order"): r"rank \d has called 1 collectives in \S+, last gloo:(broadcast|all_reduce)",
    ("out_of_memory", "losses"): r"tried to hold [\d,]+ bytes of.*\n +[\d,]+  line \d+, in <lambda>: .*cross_entropy",
    ("out_of_memory", "outputs"): r"tried to hold [\d,]+ bytes of(.|\n)*line \d+, in train: scores = ",
    ("out_of_memory", "logits"): r"tried to hold [\d,]+ bytes of.*\n +[\d,]+  line \d+, in <lambda>: .*cross_entropy",
    ("not_a_number", "mask"): r"^step 0, line \d+, in attention: return scores.softmax",
    ("not_a_number", "norm"): r"^step 0, line \d+, in train: loss.backward\(\)\naten.div",
    ("not_a_number", "half"): r"^step 0, line \d+, in attention: scores = .*half\(\).*\naten.mm",
    ("not_a_number", "rate"): r"^step [1-9]\d*, line \d+",
    ("losses_differ", "mean"): r"loss and gradients are wrong and no factor explains it",
    ("losses_differ", "twice"): r"scale +1.0e\+00 +2.0000\n(.|\n)*every gradient is 2 times too large",
    ("losses_differ", "divided"): r"scale +5.0e-01 +0.5000\n(.|\n)*every gradient is 2 times too small",
    ("losses_differ", "forgotten"): r"the loss is right and only scale is wrong",
    ("losses_differ", "start"): r"the ranks begin with different weights",
    ("losses_differ", "batch"): r"all ranks have the same tokens",
    ("slow", "loader"): r"every rank waits for its data",
    ("slow", "straggler"): r"rank 1 waits least",
    ("slow", "messages"): r"16 messages a step",
}


def causes(script):
    return [cause for name, cause in WHAT if name == script]


@pytest.mark.always(
    "not_a_number-rate-broken", "not_a_number-rate-fixed", "out_of_memory-outputs-broken", "out_of_memory-outputs-fixed"
)
@pytest.mark.parametrize("fixed", [False, True], ids=["broken", "fixed"])
@pytest.mark.parametrize(("script", "cause"), [key for key in WHAT if key[0] in ("out_of_memory", "not_a_number")])
def test_in_one_process_the_line_that_is_wrong_is_named_and_the_fixed_one_passes(script, cause, fixed, monkeypatch):
    module = {"out_of_memory": out_of_memory, "not_a_number": not_a_number}[script]
    monkeypatch.setattr(sys, "argv", [script, "--cause", cause, *["--fixed"][:fixed]])
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = module.main()
    assert code == (0 if fixed else 1), said.getvalue()
    assert bool(re.search(WHAT[script, cause], said.getvalue())) != fixed, said.getvalue()
    assert (said.getvalue().splitlines()[-1] == "PASS") == fixed


def compare_on_a_rank(cause):
    with contextlib.redirect_stdout(io.StringIO()) as said:
        found = losses_differ.compare(losses_differ.on_ranks(cause), losses_differ.one_process(), 2)
    return found, f"{said.getvalue()}{found}"


@pytest.mark.parametrize("cause", causes("losses_differ"))
def test_what_makes_two_layouts_differ_is_read_from_the_ratios(cause):
    found, said = run_ranks(2, compare_on_a_rank, cause)[0]
    assert found and re.search(WHAT["losses_differ", cause], said), said


def test_without_a_mistake_the_two_layouts_are_equal():
    assert run_ranks(2, compare_on_a_rank, "")[0][0] == ""


def test_a_group_of_weights_that_is_off_by_one_factor_is_named_with_it():
    loss, right = losses_differ.one_process()
    said = losses_differ.compare((loss, [right[0], right[1] / 4, right[2] / 4]), (loss, right), 2)
    assert "only first, second is wrong, by a factor of 0.2500" in said


def test_in_another_file_the_tools_name_the_lines_of_that_file():
    with (
        pytest.raises(FloatingPointError, match=r"line \d+, in test_\w+ of test_when_it_breaks.py: torch.zeros\(1\) /"),
        not_a_number.FirstNotFinite(),
    ):
        torch.zeros(1) / torch.zeros(1)
    with pytest.raises(MemoryError), out_of_memory.Budget(1000) as budget:
        torch.zeros(1000)
    [line] = budget.lines
    assert re.fullmatch(r"line \d+, in test_\w+ of test_when_it_breaks.py: torch.zeros\(1000\)", line)


def test_a_mask_that_is_handed_on_and_memory_that_nobody_has_written_are_no_mistakes():
    ones = torch.ones(2)
    with not_a_number.FirstNotFinite():
        mask = torch.triu(torch.full((4, 4), -math.inf), 1)
        scores = torch.where(mask == 0, torch.zeros(4, 4), mask) + mask
        assert scores.softmax(1).isfinite().all()
        torch.zeros(3).new_empty(1000)
        with pytest.raises(FloatingPointError, match="aten._softmax"):
            torch.full((2, 4), -math.inf).softmax(1)  # a row of which nothing is to be seen
        with pytest.raises(FloatingPointError, match="aten.sub"):
            mask - mask
        with pytest.raises(FloatingPointError, match="aten.masked_fill"):
            ones.masked_fill(ones > 0, math.inf)  # a mask with the wrong sign
        assert torch.zeros(2).log().exp().sum() == 0
        torch.zeros(2).to(torch.float8_e4m3fn)
        for operation, given in ((Tensor.log, -ones), (Tensor.log1p, -2 * ones), (lambda x: x.div_(0), ones.clone())):
            with pytest.raises(FloatingPointError, match="largest that it got was [12]$"):
                operation(given)


def test_a_view_of_weights_that_were_there_before_is_nothing_new():
    weight = torch.ones(100, 100)
    with out_of_memory.Budget(10_000) as budget:
        product = torch.ones(10, 100) @ weight.t()
    assert budget.peak == 4 * 2 * product.numel()


def called_without_a_name_for_the_back_end():
    torch.distributed.all_reduce(torch.ones(5))
    with patch.object(torch.distributed, "get_backend", lambda *_: "cpu:gloo,cuda:nccl"):
        return hangs.called()


def test_the_recorder_is_found_whatever_the_back_end_is_called():
    run_ranks(2, many_and_few)  # these processes may have called others before, in groups of other tests
    for said in run_ranks(2, called_without_a_name_for_the_back_end):
        assert [line for line in said if line.startswith("has called 1 collectives in 0:default_pg, last gloo:all_red")]


def many_and_few():
    """More collectives in one group than the recorder remembers, then a few in another."""
    ranks = list(range(torch.distributed.get_world_size()))
    for name, count in (("many", 130), ("few", 3)):
        group = torch.distributed.new_group(ranks, group_desc=name)
        for _ in range(count):
            torch.distributed.all_reduce(torch.ones(5), group=group)
    return hangs.called(), len(hangs.flight_recorder())


def test_the_alarm_counts_the_collectives_of_each_group_beyond_what_the_recorder_remembers():
    for said, remembered in run_ranks(2, many_and_few):
        assert remembered == 100
        for name, count in (("many", 130), ("few", 3)):
            assert [line for line in said if f"has called {count} collectives in " in line and f":{name}, " in line]
            assert all("last gloo:all_reduce of [[5]]" in line for line in said if f":{name}, " in line)


def table_of_a_rank(cause, fixed):
    clock = slow.train(cause, fixed)
    return [clock.seconds[part] for part in slow.PARTS], clock.messages


@pytest.mark.always("straggler")
@pytest.mark.parametrize("cause", causes("slow"))
def test_what_makes_a_step_slow_is_read_from_the_table_of_all_ranks(cause):
    rows, messages = zip(*run_ranks(2, table_of_a_rank, cause, False), strict=True)
    assert re.search(WHAT["slow", cause], slow.diagnosis(torch.tensor(rows), messages[0]))
    rows, messages = zip(*run_ranks(2, table_of_a_rank, cause, True), strict=True)
    said = slow.diagnosis(torch.tensor(rows), messages[0])  # a machine that does other things may be slow for others
    assert not re.search(WHAT["slow", cause], said) or cause == "straggler"
    assert messages == (slow.STEPS, slow.STEPS)


@pytest.mark.prove
@pytest.mark.parametrize("cause", causes("hangs"))
def test_each_rank_says_where_it_waits_and_the_job_ends(cause):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run([*command, HERE / "hangs.py", "--cause", cause], capture_output=True, text=True, timeout=300)
    said = done.stdout + done.stderr
    assert done.returncode == 1 and "PASS" not in done.stdout, said
    assert re.search(WHAT["hangs", cause], said), said
    assert set(re.findall(r"rank (\d) waits at line", said)) == {"0", "1"}, said


def train_to_the_end(cause):
    rank = torch.distributed.get_rank()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        hangs.train(rank, cause, True, hangs.Alarm(rank, 120))
    return said.getvalue().count("loss 1.50")


@pytest.mark.parametrize("cause", causes("hangs"))
def test_a_loop_that_is_fixed_ends(cause):
    assert run_ranks(2, train_to_the_end, cause) == [4 if cause == "branch" else 0, 0]


def test_the_readme_speaks_of_each_cause_and_of_no_other():
    text = (HERE / "README.md").read_text()
    named = {(s, cause) for s, all_ in re.findall(r"(\w+)\.py --cause ([\w|]+)", text) for cause in all_.split("|")}
    assert named == WHAT.keys()
    for _, cause in WHAT:
        assert f"| `{cause}`: " in text


def test_the_lines_that_the_readme_quotes_are_those_of_the_scripts():
    parts = re.split(r"(?m)^## ", (HERE / "README.md").read_text())[1:]
    quoted = []
    for part in parts:
        script = re.search(r"(\w+\.py) --cause", part)[1]
        for number, text in re.findall(r"(?m)line (\d+), in \S+: (.*?)(?: *\.\.\.)?$", part):
            quoted.append((script, number))
            line = (HERE / script).read_text().splitlines()[int(number) - 1].strip()
            assert line.startswith(text), f"{script}:{number} is {line!r}, not {text!r}"
    assert len(quoted) >= 5


@pytest.mark.parametrize("script", sorted({script for script, _ in WHAT}))
def test_an_unknown_cause_is_refused_before_anything_starts(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [script, "--cause", "moon"])
    with pytest.raises(SystemExit) as end:
        sys.modules[script].main()
    assert end.value.code == 2 and "invalid choice: 'moon'" in capsys.readouterr().err.splitlines()[-1]
    if script in ("hangs", "losses_differ", "slow"):
        monkeypatch.setattr(sys, "argv", [script, "--cause", causes(script)[0]])
        monkeypatch.delenv("RANK", raising=False)
        with pytest.raises(SystemExit):
            sys.modules[script].main()
        assert "start it with torchrun" in capsys.readouterr().err
