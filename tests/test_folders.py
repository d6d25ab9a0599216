"""Each chapter is whole: its folder, copied alone into an empty directory, runs with python and with torchrun.

Also what holds for the repository as a whole: the README's map, the Makefile's targets, the benchmarks' manners.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness.plant import ROOT, all_mistakes, copy_repository, plant

CHAPTERS = sorted(folder for folder in ROOT.glob("[01][0-9]_*") if not folder.name.startswith("11"))
SCRIPTS = [p for c in CHAPTERS for p in sorted(c.glob("*.py")) if not re.match(r"test_|bench_|_", p.name)]
BENCHMARKS = {p.stem: p for c in CHAPTERS for p in sorted(c.glob("bench_*.py"))}


def run(command, folder, timeout=180):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout)


def torchrun(ranks):
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]


# With python alone, the scripts of chapters 01 and 02: the later chapters have a test of their own for it.
ALONE = [(script, "torchrun") for script in SCRIPTS]
ALONE += [(script, "python") for script in SCRIPTS if script.parent.name < "03"]


@pytest.mark.parametrize(("script", "launcher"), ALONE, ids=lambda value: getattr(value, "stem", value))
def test_a_script_copied_alone_runs_and_ends_with_pass(script, launcher, tmp_path):
    alone = shutil.copytree(script.parent, tmp_path / "alone", ignore=shutil.ignore_patterns("__pycache__"))
    ranks = 1 if script.parent.name.startswith("01") else 2  # chapter 01 is about one process
    done = run([*([sys.executable] if launcher == "python" else torchrun(ranks)), script.name], alone)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.strip().splitlines()[-1] == "PASS"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_an_unknown_option_is_one_line_and_exit_code_2(script, tmp_path):
    done = run([sys.executable, str(script), "--no-such-option", "7"], tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "--no-such-option" in done.stderr


# For each benchmark a mistake that makes its results wrong, which it has to notice before it times anything.
SPOILERS = {
    "bench_llama": ("llama", "scores_are_not_scaled"),
    "bench_accounting": ("accounting", "the_input_of_a_linear_layer_is_counted_for_each_reader"),
    "bench_single_gpu": ("llama", "the_loss_is_a_mean"),
    "bench_collectives": ("collectives", "chunk_is_added_one_step_too_late"),
    "bench_data_parallel": ("data_parallel", "gradients_are_averaged"),
    "bench_zero_memory": ("zero_memory", "stage_3_keeps_all_weights"),
    "bench_zero": ("zero", "average_instead_of_sum"),
    "bench_zero3": ("zero", "average_instead_of_sum"),
    "bench_zero_state": ("zero_state", "every_rank_saves_its_own_slice"),
    "bench_zero_r": ("zero_r", "every_rank_keeps_the_first_piece"),
    "bench_zero_buffers": ("zero_buffers", "the_last_partial_buffer_is_never_sent"),
    "bench_tensor_parallel": ("tensor_parallel", "f_forgets_the_gradients_of_the_other_ranks"),
    "bench_parallel_block": ("parallel_block", "norm_weights_are_never_summed"),
    "bench_parallel_llama": ("parallel_llama", "maximum_of_my_own_words"),
    "bench_overlap": ("overlap", "the_sum_ends_at_the_wrong_rank"),
    "bench_ring_attention": ("ring_attention", "the_merge_forgets_that_lse_is_a_logarithm"),
    "bench_ulysses": ("ulysses", "tokens_of_the_ranks_are_interleaved"),
}


def test_every_benchmark_has_a_mistake_that_it_must_notice():
    known = {(m.script.stem, m.name) for m in all_mistakes()}
    assert SPOILERS.keys() == BENCHMARKS.keys()
    assert set(SPOILERS.values()) <= known


# A benchmark takes longer than a test may: each run of the tests tries one of every chapter, RUN_ALL_BENCHMARKS=1 all.
CHOSEN = [min(c.glob("bench_*.py")).stem for c in CHAPTERS]


@pytest.mark.parametrize("bench", list(BENCHMARKS) if os.environ.get("RUN_ALL_BENCHMARKS") else CHOSEN)
def test_a_benchmark_verifies_first_and_writes_nothing_when_the_code_is_wrong(bench, tmp_path):
    script, name = SPOILERS[bench]
    [mistake] = [m for m in all_mistakes() if (m.script.stem, m.name) == (script, name)]
    copy = copy_repository(tmp_path / "copy")
    plant(mistake, copy)
    done = run([sys.executable, str(copy / BENCHMARKS[bench].relative_to(ROOT))], copy)
    assert done.returncode != 0, done.stdout[-2000:]
    assert not list(copy.glob("results/*.json"))


def test_every_chapter_folder_is_on_the_map_and_every_link_leads_somewhere():
    text = (ROOT / "README.md").read_text()
    for chapter in CHAPTERS:
        assert f"({chapter.name}/README.md)" in text, f"README.md does not list {chapter.name}"
    for readme in [ROOT / "README.md", *ROOT.glob("*/README.md")]:
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", readme.read_text()):
            assert (readme.parent / link).exists(), f"{readme.relative_to(ROOT)} links to {link}"


def test_every_script_in_a_readme_command_exists():
    for readme in [ROOT / "README.md", *ROOT.glob("*/README.md")]:
        for command in re.findall(r"(?:python|torchrun|sbatch)[^\n`]*?(\S+\.(?:py|sbatch))", readme.read_text()):
            by_a_student = command.startswith("student/")  # made by `make exercise`
            assert by_a_student or any((base / command).exists() for base in (ROOT, readme.parent)), (
                f"{readme}: {command}"
            )


def test_make_lists_its_targets():
    done = run(["make"], ROOT)
    targets = re.findall(r"^([a-z-]+): .*##", Path(ROOT / "Makefile").read_text(), re.MULTILINE)
    assert done.returncode == 0
    assert {"train", "test", "lint", "bench"} <= set(targets)
    for target in targets:
        assert f"make {target}" in done.stdout
