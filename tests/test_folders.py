"""Each chapter is whole: its folder, copied alone into an empty directory, runs with python and with torchrun.

Also what holds for the repository as a whole: the README's map, the Makefile's targets, the benchmarks' manners.
"""

import contextlib
import io
import multiprocessing
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness.house import CHAPTERS, ROOT, chapter_of, files, scripts
from harness.plant import all_mistakes, copy_repository, plant
from harness.ranks import PRELOAD, run_ranks

SCRIPTS = scripts()
BENCHMARKS = {p.stem: p for c in CHAPTERS for p in files("bench_*.py", c)}


def run(command, folder, timeout=180, **more):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"} | more
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout)


# Python runs a module of this name at its start. A thread of a process group that is alive when the interpreter ends
# aborts it now and then (it drops the last tensor it worked on, and for that it needs an interpreter).
THREADS_AT_THE_END = """
import atexit, os
def threads():
    names = {open(f"/proc/self/task/{t}/comm").read().strip() for t in os.listdir("/proc/self/task")}
    with open(f"{os.environ['THREADS']}/{os.getpid()}", "w") as file:
        file.write("\\n".join(names))
if "RANK" in os.environ:
    atexit.register(threads)
"""


def torchrun(ranks):
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]


def forked_rank(pipe, rank, ranks, port, script, said):
    """What torchrun starts, without its seconds: this process was forked from one that has imported torch."""
    with open(said, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
    torch.set_num_threads(1)
    os.chdir(script.parent)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "none"}
    sys.argv, sys.path[0:0] = [script.name], [str(script.parent)]
    code, alive = 0, {"__name__": "__main__", "__file__": str(script)}  # as when an interpreter ends: still there
    try:
        exec(compile(script.read_text(), str(script), "exec"), alive)
    except SystemExit as end:
        code = end.code or 0
    sys.stdout.flush()
    names = [Path(f"/proc/self/task/{task}/comm").read_text() for task in os.listdir("/proc/self/task")]
    pipe.send((code, any("gloo_runloop" in name for name in names)))


def run_forked(script, ranks, timeout=180):
    """[(exit code, is a thread of a group still alive?, what was said)] of each rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    running, ends = [], []
    for rank in range(ranks):
        mine, theirs = context.Pipe()
        said = script.with_name(f"said-{rank}")
        process = context.Process(target=forked_rank, args=(theirs, rank, ranks, store.port, script, said))
        process.start()
        theirs.close()
        running.append((process, mine, said))
    for process, pipe, said in running:
        try:
            end = pipe.recv() if pipe.poll(timeout) else ("too slow", False)
        except EOFError:
            end = ("died", False)
        process.kill()
        process.join()
        ends.append((*end, said.read_text()))
    return ends


def is_about_one_gpu(script):
    return chapter_of(script).name[:2] in ("01", "09") and "init_process_group" not in script.read_text()


# By the commands of the READMEs the first script of each chapter; the others in ranks that need not import torch again.
# With python alone, the scripts of chapters 01 and 02: the later chapters have a test of their own for it.
FIRST = [next(script for script in SCRIPTS if chapter_of(script) == chapter) for chapter in CHAPTERS]
ALONE = [(script, "torchrun") for script in FIRST]
ALONE += [(script, "python") for script in SCRIPTS if chapter_of(script).name < "03"]


def copied_alone(script, to):
    return shutil.copytree(script.parent, to / "alone", ignore=shutil.ignore_patterns("__pycache__"))


@pytest.mark.parametrize(("script", "launcher"), ALONE, ids=lambda value: getattr(value, "stem", value))
def test_a_script_copied_alone_runs_and_ends_with_pass(script, launcher, tmp_path):
    alone = copied_alone(script, tmp_path)
    ranks = 1 if is_about_one_gpu(script) else 2
    watch = tmp_path / "watch"
    watch.mkdir()
    (watch / "sitecustomize.py").write_text(THREADS_AT_THE_END)
    command = [*([sys.executable] if launcher == "python" else torchrun(ranks)), script.name]
    done = run(command, alone, PYTHONPATH=str(watch), THREADS=str(watch), PYTHONFAULTHANDLER="1")
    said = "\n".join(line for line in done.stderr.splitlines() if "torch/distributed/" not in line)
    assert done.returncode == 0, done.stdout[-2000:] + said[:4000]
    assert done.stdout.strip().splitlines()[-1] == "PASS"
    if launcher == "torchrun" and Path("/proc/self/task").exists():
        reports = [file.read_text() for file in watch.iterdir() if file.suffix != ".py" and file.is_file()]
        assert len(reports) == ranks
        assert not [report for report in reports if "gloo_runloop" in report]


KEEPS_ITS_GROUP = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
KEPT = dist.new_group([0, 1])
dist.all_reduce(torch.ones(1), group=KEPT)
print("PASS")
raise SystemExit(3)
"""


def test_a_script_that_keeps_its_group_and_its_exit_code_are_noticed(tmp_path):
    script = tmp_path / "keeps.py"
    script.write_text(KEEPS_ITS_GROUP)
    assert run_forked(script, 2) == [(3, True, "PASS\n")] * 2
    script.write_text("1 / 0")
    ends = run_forked(script, 2)
    assert [code for code, *_ in ends] == ["died"] * 2 and all("ZeroDivisionError" in said for *_, said in ends)


@pytest.mark.parametrize("script", [script for script in SCRIPTS if script not in FIRST], ids=lambda p: p.stem)
def test_a_script_copied_alone_passes_on_its_ranks_and_leaves_no_thread_of_a_group_behind(script, tmp_path):
    ends = run_forked(copied_alone(script, tmp_path) / script.name, 1 if is_about_one_gpu(script) else 2)
    for rank, (code, alive, said) in enumerate(ends):
        assert code == 0, f"rank {rank}: {code}\n{said[-4000:]}"
        assert not alive, f"rank {rank} ends with a thread of a process group"
    assert ends[0][2].strip().splitlines()[-1] == "PASS", ends[0][2][-2000:]


def ends_of_scripts(scripts, option):
    """[exit code, stdout, stderr] of each script with this option, run in this process, which has imported torch."""
    ends = []
    for script in scripts:
        said, complained, code = io.StringIO(), io.StringIO(), None
        sys.argv, sys.path[0:0] = [str(script), option, "7"], [str(script.parent)]
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained):
                runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            code = end.code
        del sys.path[0]
        ends.append((code, said.getvalue(), complained.getvalue()))
    return ends


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda p: p.name)
def test_an_unknown_option_is_one_line_and_exit_code_2(chapter):
    [ends] = run_ranks(1, ends_of_scripts, scripts(chapter), "--no-such-option")
    for script, (code, said, complained) in zip(scripts(chapter), ends, strict=True):
        assert code == 2, script.name
        assert said == "", script.name
        assert len(complained.splitlines()) == 1, (script.name, complained)
        assert "--no-such-option" in complained, script.name


# Which planted mistake each benchmark has to notice before it times anything: `spoils` in exercises/mistakes.
SPOILERS = {bench: mistake for mistake in all_mistakes() for bench in mistake.spoils.split()}


def test_every_benchmark_has_a_mistake_that_it_must_notice():
    assert SPOILERS.keys() == BENCHMARKS.keys()


# A benchmark takes longer than a test may: each run of the tests tries one of every chapter, RUN_ALL_BENCHMARKS=1 all.
CHOSEN = [min(files("bench_*.py", c)).stem for c in CHAPTERS]


@pytest.mark.parametrize("bench", list(BENCHMARKS) if os.environ.get("RUN_ALL_BENCHMARKS") else CHOSEN)
def test_a_benchmark_verifies_first_and_writes_nothing_when_the_code_is_wrong(bench, tmp_path):
    copy = copy_repository(tmp_path / "copy")
    plant(SPOILERS[bench], copy)
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
            # The course's commands are meant from inside the chapter's folder, and say so.
            floors = [chapter / floor for chapter in CHAPTERS for floor in ("", "in_depth")]
            bases = [ROOT, readme.parent, *(floors if readme.parent.name == "exercises" else ())]
            assert by_a_student or any((base / command).exists() for base in bases), f"{readme}: {command}"


def test_make_lists_its_targets():
    done = run(["make"], ROOT)
    targets = re.findall(r"^([a-z-]+): .*##", Path(ROOT / "Makefile").read_text(), re.MULTILINE)
    assert done.returncode == 0
    assert {"train", "test", "lint", "bench"} <= set(targets)
    for target in targets:
        assert f"make {target}" in done.stdout
