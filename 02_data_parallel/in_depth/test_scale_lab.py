"""The laboratory against formulas in their limits, a second simulation, and sums that are really done."""

import math
import sys
from dataclasses import replace
from datetime import timedelta

import pytest
import scale_lab
import torch
import torch.distributed as dist
from harness.meter import communication
from harness.ranks import run_ranks
from harness.reference import assert_same
from scale_lab import (
    ALGORITHMS,
    Machine,
    Work,
    all_reduce_hierarchical,
    efficiency,
    hidden_from,
    hierarchical,
    in_network,
    recipe,
    ring,
    rows_of,
    step_seconds,
    two_trees,
)

M, W = Machine(), Work()


def test_all_checks_of_the_demo_pass_and_nan_does_not(monkeypatch):
    assert scale_lab.wrong_formulas() == []
    monkeypatch.setattr(scale_lab, "ring", lambda *_: math.nan)
    assert any("nan" in line for line in scale_lab.wrong_formulas())


def test_the_latency_of_a_ring_is_ten_milliseconds_on_512_ranks_and_twenty_on_1024():
    free = replace(M, beta=0.0)
    assert ring(512, 25e6, free) == pytest.approx(10.22e-3)
    assert ring(1024, 25e6, free) == pytest.approx(20.46e-3)
    assert two_trees(1024, 25e6, free) == pytest.approx(20 * 10e-6)


def test_on_one_rank_no_algorithm_takes_any_time():
    assert {name: f(1, 1e6, M) for name, f in ALGORITHMS.items()} == dict.fromkeys(ALGORITHMS, 0.0)


def test_a_hierarchy_sends_a_gth_between_nodes_and_pays_the_slow_start_once_for_each_node():
    slow_only = replace(M, inner_alpha=0.0, inner_beta=0.0)
    n, nodes = 1e6, 128 // 8
    want = 2 * (nodes - 1) * M.alpha + 2 * (nodes - 1) / nodes * n / 8 * M.beta
    assert hierarchical(128, n, slow_only) == pytest.approx(want)
    fast_only = replace(M, alpha=0.0, beta=0.0)
    assert hierarchical(128, n, fast_only) == pytest.approx(14 * M.inner_alpha + 14 / 8 * n * M.inner_beta)
    assert hierarchical(4, n, fast_only) == pytest.approx(6 * M.inner_alpha + 6 / 4 * n * M.inner_beta), "half a node"


def test_switches_that_add_send_less_than_a_ring_that_is_optimal_among_ranks():
    free = replace(M, alpha=0.0)
    assert in_network(1024, 1e9, free) == pytest.approx(1e9 * M.beta)
    assert ring(1024, 1e9, free) / in_network(1024, 1e9, free) == pytest.approx(2 * 1023 / 1024)
    assert in_network(32, 0, M) == pytest.approx(2 * M.alpha) and in_network(33, 0, M) == pytest.approx(4 * M.alpha)


def by_events(ranks, w, m, algorithm):
    """The step again: a clock that moves from one event to the next."""
    total, sent, clock = w.parameters * w.gradient_bytes, 0.0, 0.0
    computed = 6 * w.parameters * w.tokens / m.flops
    while sent < total * (1 - 1e-12):
        size = min(w.bucket, total - sent)
        sent += size
        ready = computed / 3 + computed * 2 / 3 * sent / total
        clock = (ready if ready > clock else clock) + algorithm(ranks, size, m)
    return max(clock, computed)


@pytest.mark.parametrize("ranks", [1, 8, 512])
@pytest.mark.parametrize("tokens", [1000, 16384, 200_000])
@pytest.mark.parametrize("bucket", [1e6, 25 * 2**20, 1e12])
def test_a_step_ends_when_the_last_bucket_has_arrived(ranks, tokens, bucket):
    w = replace(W, tokens=tokens, bucket=bucket)
    for name, algorithm in ALGORITHMS.items():
        seconds, exposed = step_seconds(ranks, w, M, algorithm)
        assert seconds == pytest.approx(by_events(ranks, w, M, algorithm)), name
        computed = 6 * w.parameters * tokens / M.flops
        assert seconds == pytest.approx(computed + exposed), name


def test_above_the_batch_that_hides_the_wire_only_the_last_bucket_is_exposed_and_below_more():
    for ranks in (8, 128, 1024):
        least = hidden_from(ranks, W, M)
        last = W.parameters * W.gradient_bytes % W.bucket
        enough = step_seconds(ranks, replace(W, tokens=math.ceil(least * 1.01)), M)[1]
        assert enough <= ring(ranks, W.bucket, M) + ring(ranks, last, M)
        assert step_seconds(ranks, replace(W, tokens=int(least * 0.8)), M)[1] > 3 * ring(ranks, W.bucket, M)


def test_without_latency_the_batch_that_hides_the_wire_is_f_over_b_for_gradients_of_two_bytes():
    free = replace(M, alpha=0.0)
    assert hidden_from(10**6, W, free) == pytest.approx(400e12 / 50e9, rel=1e-5)  # 8000 tokens
    larger = replace(W, parameters=70e9)
    assert hidden_from(10**6, larger, free) == pytest.approx(hidden_from(10**6, W, free)), "the model's size is gone"
    assert hidden_from(10**6, replace(W, gradient_bytes=4), free) == pytest.approx(2 * 8000, rel=1e-5)
    for small in (replace(W, parameters=1e6), replace(W, bucket=2 * 10**6)):  # a bucket holds no more than there is
        assert hidden_from(64, small, M) * 4 * 1e6 / M.flops == pytest.approx(ring(64, 2e6, M))


def test_the_ring_falls_off_its_cliff_at_hundreds_of_ranks_and_the_others_do_not():
    assert efficiency(32, W, M) > 0.95
    assert efficiency(512, W, M) < 0.3
    assert all(efficiency(512, W, M, ALGORITHMS[name]) > 0.95 for name in ALGORITHMS if name != "ring")
    assert efficiency(512, replace(W, tokens=131072), M) > 0.95, "a batch eight times as large hides it again"
    assert efficiency(512, replace(W, bucket=400 * 2**20), M) > 2 * efficiency(512, W, M), (
        "so do larger buckets, partly"
    )


def test_every_row_is_read_once_an_epoch_and_another_number_of_ranks_reads_the_same_batches():
    batches = {
        ranks: [sorted(row for r in range(ranks) for row in rows_of(step, r, ranks, 8, 20)) for step in range(5)]
        for ranks in (1, 2, 4, 8)
    }
    assert batches[1] == batches[2] == batches[4] == batches[8]
    rows = [row for step in range(5) for row in rows_of(step, 0, 1, 8, 20)]
    assert sorted(rows[:20]) == sorted(rows[20:]) == list(range(20)), "an epoch may end in the middle of a batch"
    assert rows[:20] != rows[20:] and rows[:20] != list(range(20)), "each epoch has its own order"
    orders = {tuple(rows_of(epoch, 0, 1, 20, 20, seed=seed)) for epoch in range(3) for seed in range(3)}
    assert len(orders) == 9, "each pair of seed and epoch has its own order"


def test_the_order_of_an_epoch_is_drawn_once_for_all_rows_of_a_step(monkeypatch):
    drawn, draw, seen = [], torch.randperm, {}
    monkeypatch.setattr(torch, "randperm", lambda *a, **k: drawn.append(a) or draw(*a, **k))
    for step, epochs in ((0, 1), (1, 2), (3, 1)):  # rows 0 to 29, 30 to 59, 90 to 119 of epochs of 40
        drawn.clear()
        seen[step] = rows_of(step, 1, 3, 30, 40)
        assert len(drawn) == epochs, f"step {step}: {len(drawn)} permutations for {epochs} epoch(s)"
    orders = [draw(40, generator=torch.Generator().manual_seed(epoch)).tolist() for epoch in range(3)]
    places = [row for order in orders for row in order]
    assert seen == {step: places[30 * step + 1 : 30 * step + 30 : 3] for step in seen}


@pytest.mark.parametrize(
    ("ranks", "fit", "want"),
    [(128, 2, (8, 2, 4)), (512, 2, (2, 2, 1)), (128, 3, (8, 2, 4)), (1, 5, (1024, 4, 256)), (1024, 9, (1, 1, 1))],
)
def test_four_million_tokens_on_some_ranks(ranks, fit, want):
    mine, micro, accumulation = recipe(4 * 2**20, 4096, ranks, fit)
    assert (mine, micro, accumulation) == want
    assert ranks * micro * accumulation * 4096 == 4 * 2**20, "the batch is the training's choice, not the machine's"


def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_that_does():
    with pytest.raises(ValueError, match="--ranks 96 does not divide a batch of 1024 sequences; 64 does"):
        recipe(4 * 2**20, 4096, 96, 2)
    with pytest.raises(ValueError, match="--ranks 2048 does not divide a batch of 1024 sequences; 1024 does"):
        recipe(4 * 2**20, 4096, 2048, 2)
    with pytest.raises(ValueError, match="--batch-tokens 5000 is no multiple of --sequence 4096"):
        recipe(5000, 4096, 1, 1)


def two_nodes(numel):
    """Ranks 0, 1 and 2, 3 are nodes. Bytes sent to my peer in the other node, and the sum."""
    rank = dist.get_rank()
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    x = torch.randn(numel, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    between, real = [], dist.batch_isend_irecv

    def counted(messages):
        between.extend(m.tensor.nbytes for m in messages if m.op is dist.isend and m.group is across)
        return real(messages)

    dist.batch_isend_irecv = counted
    try:
        with communication() as sent:
            all_reduce_hierarchical(x, inside, across)
    finally:
        dist.batch_isend_irecv = real
    return x, sum(between), sent.total


@pytest.mark.parametrize("numel", [1000, 1003, 1])
def test_the_hierarchical_sum_is_right_and_sends_a_gth_of_the_tensor_between_nodes(numel):
    results = run_ranks(4, two_nodes, numel, timeout=20)
    want = sum(torch.randn(numel, dtype=torch.float64, generator=torch.Generator().manual_seed(r)) for r in range(4))
    for rank, (got, between, total) in enumerate(results):
        assert_same(got, want, 1e-14, "the hierarchical sum", rank)
        if numel == 1000:
            assert between == 2 * (2 - 1) / 2 * 8 * numel / 2, "of a half, both halves of a ring on two nodes"
            assert total == between + 8 * numel, "and as in the node's ring inside"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_demo_finds_its_sum_right_on_any_number_of_ranks(ranks):
    assert run_ranks(ranks, demo_sum, timeout=20) == [[]] * ranks


def demo_sum():
    return scale_lab.wrong_sum(dist.group.WORLD, torch.device("cpu"))


def limits_of_groups():
    limits, new_group = set(), dist.new_group
    dist.new_group = lambda *of, **options: limits.add(options.get("timeout")) or new_group(*of, **options)
    try:
        return demo_sum(), limits
    finally:
        dist.new_group = new_group


def test_the_groups_of_the_demo_wait_a_minute_and_not_half_an_hour():
    assert run_ranks(2, limits_of_groups, timeout=20) == [([], {timedelta(seconds=60)})] * 2


def machine_here():
    return scale_lab.measured(dist.group.WORLD, torch.device("cpu"))


def test_alpha_beta_and_f_are_measured_and_the_same_on_all_ranks():
    machines = run_ranks(2, machine_here, timeout=30)
    assert machines[0] == machines[1]
    assert 0 < machines[0].alpha < 1 and 0 < machines[0].beta < 1e-3 and machines[0].flops > 1e6


@pytest.mark.parametrize(
    "argv",
    [
        *(["--alpha-us", "0"], ["--alpha-us", "nan"], ["--gbytes", "-1"], ["--gbytes", "inf"], ["--tflops", "x"]),
        *(
            ["--billions", "0"],
            ["--gradient-bytes", "3"],
            ["--tokens", "0"],
            ["--tokens", "1.5"],
            ["--bucket-mib", "-2"],
        ),
        *(["--node", "6"], ["--ranks", "96"], ["--batch-tokens", "5000"], ["--rows-that-fit", "0"], ["--measure"]),
        *(["--tflops", "1e300"], ["--billions", "1e30"], ["--bucket-mib", "0.0001"]),
    ],
    ids=" ".join,
)
def test_a_bad_option_is_one_line_that_names_it_before_any_process_group(argv, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["scale_lab.py", *argv])
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("a process group was started"))
    with pytest.raises(SystemExit) as end:
        scale_lab.main()
    said = capsys.readouterr()
    assert end.value.code == 2 and said.out == "" and said.err.count("\n") == 1
    assert said.err.startswith("scale_lab.py: ") and argv[0] in said.err


@pytest.mark.parametrize("option", ["--ranks", "--rows-that-fit"])
def test_what_the_recipe_tries_one_by_one_has_a_limit(option, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", ["scale_lab.py", option, "1000001", "--batch-tokens", "1000000", "--sequence", "1"]
    )
    with pytest.raises(SystemExit):
        scale_lab.main()
    assert f"{option} 1000001 must be a number from 0.000001 to 10^6" in capsys.readouterr().err


def test_four_rows_are_drawn_to_print_four(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["scale_lab.py", "--sequence", "512", "--ranks", "64"])
    args, read, rows = scale_lab.arguments(), [], rows_of(0, 0, 64, 128 * 64, 10**5)
    monkeypatch.setattr(scale_lab, "rows_of", lambda *a: read.append(rows_of(*a)) or read[-1])
    scale_lab.tables(scale_lab.Work(), scale_lab.Machine(), args)
    assert [len(x) for x in read] == [4]
    said = f"128 sequences each, in 64 micro-batches of 2; first rows of rank 0: {rows[:4]}"
    assert said in capsys.readouterr().out


def test_the_caption_says_that_the_network_in_a_node_is_not_the_one_that_is_measured_or_given(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["scale_lab.py"])
    scale_lab.tables(W, replace(M, alpha=1e-3, beta=1 / 7e9, node=4), scale_lab.arguments())
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("alpha 1e+03 us, 1/beta 7 GB/s")
    assert second.startswith("in a node of 4") and second.endswith("alpha 3 us, 1/beta 400 GB/s")


@pytest.mark.parametrize("option", ["--alpha-us", "--gbytes", "--tflops"])
def test_what_is_measured_cannot_also_be_given(option, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["scale_lab.py", "--measure", option, "3"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        scale_lab.main()
    assert option in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        *(["--alpha-us", "3"], ["--gbytes", "7"], ["--tflops", "50"], ["--billions", "7"], ["--gradient-bytes", "4"]),
        *(["--tokens", "999"], ["--bucket-mib", "1"], ["--node", "2"], ["--ranks", "64"], ["--rows-that-fit", "8"]),
        *(["--sequence", "2048"], ["--batch-tokens", "8388608"]),
    ],
    ids=" ".join,
)
def test_every_option_changes_what_is_printed(argv):
    assert run_ranks(1, printed, argv, timeout=20) != run_ranks(1, printed, [], timeout=20)


def printed(argv):
    import contextlib
    import io

    sys.argv, said = ["scale_lab.py", *argv], io.StringIO()
    dist.destroy_process_group()
    with contextlib.redirect_stdout(said), pytest.raises(SystemExit) as end:
        scale_lab.main()
    assert end.value.code == 0 and said.getvalue().endswith("PASS\n"), said.getvalue()
    return said.getvalue()
