"""Each chapter is whole: its folder, copied alone into an empty directory, runs with python and with torchrun.

Also what holds for the repository as a whole: the README's map, the Makefile's targets, the benchmarks' manners.
"""

import contextlib
import gc
import io
import os
import re
import shutil
import subprocess
import sys
import traceback
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist
from harness import ranks as ranks_
from harness import warm_python
from harness.layout import CHAPTERS, HOMES, ROOT, TRAINER, chapter_of, files, homes, scripts
from harness.module_cache import forget_modules
from harness.mutations import all_mistakes, needed_by
from harness.programs import refusal, run_script
from harness.ranks import run_ranks

sys.path.insert(0, str(ROOT / "exercises"))
from sandbox import NOT_COPIED

SCRIPTS = scripts()
BENCHMARKS = {p.stem: p for c in CHAPTERS for p in files("bench_*.py", c)}


def run(command, folder, timeout=180, **more):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"} | more
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout)


# Python runs a module of this name at its start. A thread of a process group that is alive when the interpreter ends
# aborts it now and then (it drops the last tensor it worked on, and for that it needs an interpreter). A group that is
# kept in a cycle ends with it if the garbage is collected in time: here it is not, except by the script itself.
THREADS_AT_THE_END = """
import atexit, gc, os
gc.disable()
def threads():
    names = {open(f"/proc/self/task/{t}/comm").read().strip() for t in os.listdir("/proc/self/task")}
    with open(f"{os.environ['THREADS']}/{os.getpid()}", "w") as file:
        file.write("\\n".join(names))
if "RANK" in os.environ:
    atexit.register(threads)
"""


def torchrun(ranks):
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]


def copied_alone(script, to):
    """The script and the files that its README says it needs, in a folder of their own."""
    (to / "alone").mkdir()
    for file in needed_by(script):
        shutil.copy(file, to / "alone")
    return to / "alone" / script.name


def run_as_main(script, port):
    """What `torchrun` does, on ranks that are there: (exit code, is a thread of a group alive?, what was said)."""
    environment = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size()}
    environment |= {"LOCAL_WORLD_SIZE": dist.get_world_size(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "none"}
    dist.destroy_process_group()  # the script makes its own
    forget_modules(name for name in sys.modules if name.partition(".")[0] in ("harness", "test_folders"))
    before, code, said = dict(os.environ), 0, io.StringIO()
    os.environ |= {name: str(value) for name, value in environment.items()}
    sys.argv, sys.path[0:0] = [script.name], [str(script.parent)]
    main, ours = ModuleType("__main__"), sys.modules["__main__"]
    main.__file__ = str(script)
    sys.modules["__main__"] = main  # where pickle looks for the script's classes
    alive = vars(main)  # as when an interpreter ends: still there
    gc.disable()  # or a cycle that keeps a group would be noticed or not, as chance has it
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), contextlib.chdir(script.parent):
            exec(compile(script.read_text(), str(script), "exec"), alive)
    except SystemExit as end:
        code = end.code or 0
    except Exception as error:
        code = "".join(traceback.format_exception(error))
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ |= before
    sys.modules["__main__"] = ours
    found = code, threads_of_groups(), said.getvalue()
    gc.enable()
    alive.clear()
    return found


def threads_of_groups():
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            names.append(Path(f"/proc/self/task/{task}/comm").read_text())
    return any("gloo_runloop" in name for name in names)


def ends_on_ranks(script, ranks):
    ranks_._pool.stop()  # new processes: Triton reads its environment once, when it is first imported
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return run_ranks(ranks, run_as_main, script, store.port, timeout=180)


def is_about_one_gpu(script):
    return chapter_of(script).name[:2] in ("01", "09") and "init_process_group" not in script.read_text()


# Core files start as their READMEs say, and like the depth on ranks that need not import torch again. Those ranks have
# imported already what torch imports late: that it keeps a group that is up by then, torchrun alone shows.
OF_RANKS = [s for s in SCRIPTS if s.parent.name != "in_depth" and "init_process_group(" in s.read_text()]
LAUNCHED = [(SCRIPTS[0], "python"), *((script, "torchrun") for script in (*OF_RANKS, TRAINER / "five_d.py"))]


def of_ground_floors():
    for script, launcher in LAUNCHED:
        yield pytest.param(script, launcher, marks=pytest.mark.chapter(script.parent.name[:2]), id=script.stem)


@pytest.mark.long
@pytest.mark.prove
@pytest.mark.parametrize(("script", "launcher"), list(of_ground_floors()))
def test_a_script_copied_alone_runs_and_ends_with_pass(script, launcher, tmp_path):
    alone = copied_alone(script, tmp_path)
    watch = tmp_path / "watch"
    watch.mkdir()
    (watch / "sitecustomize.py").write_text(THREADS_AT_THE_END)
    command = [*([sys.executable] if launcher == "python" else torchrun(2)), script.name]
    done = run(command, alone.parent, PYTHONPATH=str(watch), THREADS=str(watch), PYTHONFAULTHANDLER="1")
    said = "\n".join(line for line in done.stderr.splitlines() if "torch/distributed/" not in line)
    assert done.returncode == 0, done.stdout[-2000:] + said[:4000]
    assert done.stdout.strip().splitlines()[-1] == "PASS"
    if launcher == "torchrun" and Path("/proc/self/task").exists():
        reports = [file.read_text() for file in watch.iterdir() if file.suffix != ".py" and file.is_file()]
        assert len(reports) == 2
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

KEEPS_ITS_GROUP_IN_A_CYCLE = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
cycle = [dist.new_group([0, 1])]
dist.all_reduce(torch.ones(1), group=cycle[0])
cycle.append(cycle)
del cycle
dist.destroy_process_group()
print("PASS")
"""


@pytest.mark.prove
def test_a_script_that_keeps_its_group_and_its_exit_code_are_noticed(tmp_path):
    script = tmp_path / "keeps.py"
    script.write_text(KEEPS_ITS_GROUP)
    assert ends_on_ranks(script, 2) == [(3, True, "PASS\n")] * 2
    script.write_text(KEEPS_ITS_GROUP_IN_A_CYCLE)
    assert ends_on_ranks(script, 2) == [(0, True, "PASS\n")] * 2
    script.write_text(KEEPS_ITS_GROUP_IN_A_CYCLE.replace("del cycle", "cycle.clear()"))
    assert ends_on_ranks(script, 2) == [(0, False, "PASS\n")] * 2
    script.write_text("1 / 0")
    assert all("ZeroDivisionError" in code for code, *_ in ends_on_ranks(script, 2))


GROUND = [script for script, _ in LAUNCHED]


@pytest.mark.always(*(script.stem for script in GROUND))
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(script, marks=pytest.mark.chapter(script.relative_to(ROOT).parts[0][:2]), id=script.stem)
        for script in [*GROUND, *(script for script in scripts() if script not in GROUND)]
    ],
)
def test_a_script_copied_alone_passes_on_its_ranks_and_leaves_no_thread_of_a_group_behind(script, tmp_path):
    ends = ends_on_ranks(copied_alone(script, tmp_path), 1 if is_about_one_gpu(script) else 2)
    for rank, (code, alive, said) in enumerate(ends):
        assert code == 0, f"rank {rank}: {code}\n{said[-4000:]}"
        assert not alive, f"rank {rank} ends with a thread of a process group"
        assert not said or rank == 0 or script not in GROUND, f"rank {rank} prints, not rank 0 alone: {said[-2000:]}"
    assert ends[0][2].strip().splitlines()[-1] == "PASS", ends[0][2][-2000:]


def refusals_of(scripts, option):
    """What each script says to this option, run in this process, which has imported torch."""
    return [refusal(script, [option, "7"]) for script in scripts]


@pytest.mark.always("03_zero", "06_pipeline_parallel")
@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda p: p.name)
def test_an_unknown_option_is_one_line_and_exit_code_2(chapter):
    for said in run_ranks(1, refusals_of, scripts(chapter), "--no-such-option")[0]:
        assert "--no-such-option" in said


# Which planted mistake each benchmark has to notice before it times anything: `spoils` in its list of mistakes.
def spoilers():
    return [(bench, m) for m in all_mistakes() if m.script[:2] != "11" for bench in m.spoils.split()]


def test_every_benchmark_has_a_mistake_that_it_must_notice():
    noticed = {bench for bench, _ in spoilers()}
    assert noticed == BENCHMARKS.keys() - {"bench_profile"}, "which profiles what its neighbours verify"


@pytest.mark.prove
@pytest.mark.parametrize(
    ("bench", "mistake"),
    [
        pytest.param(bench, m, marks=pytest.mark.chapter(m.script[:2]), id=f"{bench}-{m.name}")
        for bench, m in (spoilers() if "PROVE" in os.environ else [])  # reading all lists takes each worker a second
    ],
)
def test_a_benchmark_verifies_first_and_writes_nothing_when_the_code_is_wrong(bench, mistake, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=NOT_COPIED)
    (copy / mistake.script).write_text(mistake.planted((ROOT / mistake.script).read_text()))
    python = f"{warm_python.folder()}/python"
    done = run_script(copy / BENCHMARKS[bench].relative_to(ROOT), cwd=copy, timeout=180, python=python)
    assert done.returncode != 0, done.stdout[-2000:]
    wrong_reason = re.search(r"\b(SyntaxError|NameError|ImportError|ModuleNotFoundError)\b", done.stderr)
    assert not wrong_reason, done.stderr[-2000:]
    assert not list(copy.glob("results/*.json"))


def test_every_chapter_folder_is_on_the_map():
    text = (ROOT / "README.md").read_text()
    assert set(re.findall(r"\((\d\d_\w+)/README.md\)", text)) == HOMES == homes(ROOT)
    in_depth = re.findall(r"\d\d_\w+", (TRAINER / "paths.py").read_text())
    assert in_depth == [chapter.name for chapter in CHAPTERS]


SECTIONS = ("Compared", "Measured", "Exercises", "Questions", "Sources", "In depth")
HEADS = {
    "trap": "| trap | what it looks like from outside |",
    "exercise": "| | what to write | shapes and target | level | the test that decides |",
}


@pytest.mark.parametrize("chapter", [*CHAPTERS, TRAINER], ids=lambda folder: folder.name)
def test_every_chapter_has_the_same_sections_and_the_same_heads_of_tables(chapter):
    text = re.sub(r"^```.*?^```", "", (chapter / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    core = {p.name for p in chapter.iterdir() if re.fullmatch(r"(?!test_|bench_|_).*\.(py|cu)", p.name)}
    core = {"five_d.py"} if chapter == TRAINER else core
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    cores = [heading for heading in headings if heading.startswith("The core file: ")]
    assert re.match(rf"# Chapter {int(chapter.name[:2])}: \S", text)
    assert headings == [*cores, *SECTIONS]
    assert cores and set(re.findall(r"`(.*?)`", "".join(cores))) == core
    tables = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    assert HEADS["exercise"] in tables["Exercises"] and HEADS["exercise"] in tables["In depth"]
    assert HEADS["trap"] in tables["In depth"]


def test_make_lists_its_targets():
    done = run(["make"], ROOT)
    targets = re.findall(r"^([a-z0-9-]+): .*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert done.returncode == 0 and {"train", "test", "lint", "bench"} <= set(targets)
    assert re.findall(r"^  make (\S+)", done.stdout, re.MULTILINE) == targets


def test_make_takes_one_chapter_and_folders_with_spaces():
    def recipe(*words):
        done = run(["make", "-n", "-o", ".venv/.ready", *words], ROOT, MAKEFLAGS="")
        return done.returncode, done.stdout

    for target in ("bench", "figures"):
        _, one = recipe(target, "CH=1")
        assert 'test -n "" ' in one and not re.search(r"\b1[01]_|1\*", one), "chapters 10 and 11 are not chapter 1"
    assert set(re.findall(r"\d\d_\w+", recipe("bench", "CH=03")[1])) == {"03_zero"}
    assert {chapter.name for chapter in [*CHAPTERS, TRAINER]} == set(re.findall(r"\d\d_\w+", recipe("bench")[1]))
    assert '"my class"' in recipe("grade", "DIR=my class")[1] and '"a b"' in recipe("results", "FROM=a b")[1]
