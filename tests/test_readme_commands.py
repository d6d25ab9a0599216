"""Every command that a README prints: its options are read by the script itself, and `make prove` runs it as printed.

Commands stand in blocks that begin with ```sh, one a line. What cannot be run as printed says so in a comment above its
block, which a reader of the page does not see:

    <!-- shortened: `--steps 5000` to `--steps 5` -->    in the commands of this block
    <!-- not run: `--gpu` needs a GPU -->                those with these words; REASONS are all that there are
    <!-- ends with 2: `--tp 3` -->                       the exit code that the text promises; otherwise it is 0
    <!-- first: `mkdir mine` -->                         what a reader has already, and a fresh copy has not

A block runs from top to bottom in a copy of the repository of its own: the first command of a README as a reader
starts it, the others with a Python that has imported torch already (harness/warm_python.py). Commands in backquotes in
the text are read too, and not run.
"""

import argparse
import contextlib
import io
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
from harness import ranks as ranks_
from harness import warm_python
from harness.layout import ROOT
from harness.ranks import run_ranks

REASONS = ("a GPU", "eight GPUs", "several machines", "a run on a cluster", "nvcc", "a network", "many minutes")
PROGRAM = re.compile(
    r"([A-Z_]+=\S* )*(\S*/)?(make|python3?|torchrun|pip|pytest|git|nvcc|ncu|g\+\+|sbatch|srun|curl|uv) "
)
ALSO = re.compile(r"(bash|sh|cd|mkdir|cp|rm|sed) ")  # in a block of commands; elsewhere these may be words
RULE = re.compile(r"<!-- (shortened|not run|ends with \d+|first): (.*) -->")
SPAN = re.compile(r"`((?:make|python3?|torchrun|sbatch) [^`]+)`")
NO_COPY = shutil.ignore_patterns(".*", "__pycache__", "runs", "student", "pages", "site", "mkdocs.yml")


def readmes() -> list[Path]:
    made = ("cheat_sheet.md", "glossary.md")
    found = [f for folder in (".", "*", "*/*") for f in ROOT.glob(f"{folder}/*.md")]
    kept = [f for f in found if f.name not in made and not {"student", "pages", "site", "runs", ".venv"} & {*f.parts}]
    return sorted(kept)


def alternatives(command: str) -> list[str]:
    """`--cause a|b` is two commands."""
    several = re.search(r"(?<= )[\w-]+(?:\|[\w-]+)+", command)
    return [command.replace(several[0], one) for one in several[0].split("|")] if several else [command]


@dataclass
class Command:
    printed: str
    run: str
    code: int = 0
    reason: str = ""  # why it is not run


@dataclass
class Block:
    readme: Path
    line: int
    commands: list[Command] = field(default_factory=list)
    first: list[str] = field(default_factory=list)


def ruled(printed: list[str], rules: list[tuple[str, str]]) -> Block:
    """The commands with what the comments above them say. ValueError for a comment that is about none of them."""
    block = Block(Path(), 0, [Command(one, one) for line in printed for one in alternatives(line)])
    for kind, words in rules:
        quoted = re.findall(r"`([^`]+)`", words)
        end = "(?!-)" if kind == "shortened" else ""  # `make train` is not the beginning of `make train-3d`
        about = [c for c in block.commands if quoted and re.search(re.escape(quoted[0]) + end, c.run)]
        if kind == "first":
            block.first += quoted
        elif not about:
            raise ValueError(f"no command of the block has what this is about: {kind}: {words}")
        for command in about if kind != "first" else []:
            if kind == "shortened":
                command.run = command.run.replace(*quoted)
            elif kind == "not run":
                reason = re.fullmatch(r"`[^`]+` needs (.*)", words)
                if not reason or reason[1] not in REASONS:
                    raise ValueError(f"{words}: the reasons are: needs {', '.join(REASONS)}")
                command.reason = reason[1]
            else:
                command.code = int(kind.split()[-1])
    return block


def blocks_of(readme: Path, text: str) -> list[Block]:
    """All blocks of commands. ValueError for a command without a class: in another block, or no command at all."""
    found, rules, inside, start, lines = [], [], None, 0, []
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{readme}:{number}"
        if line.startswith("```"):
            if inside is None:
                inside, start, lines = line[3:].strip(), number, []
                continue
            if inside == "sh":
                printed = "\n".join(lines).replace("\\\n", " ").splitlines()
                printed = [" ".join(re.sub(r"(^|\s\s+)# .*", "", line).split()) for line in printed]
                for one in filter(None, printed):
                    if not PROGRAM.match(one + " ") and not ALSO.match(one):
                        raise ValueError(f"{where}: is this a command? {one}")
                try:
                    block = ruled(list(filter(None, printed)), rules)
                except ValueError as wrong:
                    raise ValueError(f"{where}: {wrong}") from None
                block.readme, block.line = readme, start
                found.append(block)
            inside, rules = None, []
        elif inside is not None:
            lines.append(line)
            if inside != "sh" and PROGRAM.match(line.strip() + " "):
                raise ValueError(f"{where}: a command in a block that does not begin with ```sh: {line.strip()}")
        elif rule := RULE.fullmatch(line.strip()):
            rules.append((rule[1], rule[2]))
        elif line.strip() and rules:
            raise ValueError(f"{where}: a comment about commands, and no block of commands below it")
    return found


@cache
def read() -> tuple[list[Block], list[str]]:
    """All blocks, and what is wrong with a README."""
    found, wrong = [], []
    for readme in readmes():
        try:
            found += blocks_of(readme, readme.read_text())
        except ValueError as fault:
            wrong.append(str(fault))
    return found, wrong


def blocks() -> list[Block]:
    return read()[0]


def name_of(block: Block) -> str:
    same = [other for other in blocks() if other.readme == block.readme]
    words = [
        *block.readme.relative_to(ROOT).parts[:-1],
        *([] if block.readme.stem == "README" else [block.readme.stem]),
    ]
    return f"{'-'.join(words) or 'front'}-{same.index(block) + 1}"


def home(readme: Path, script: str) -> Path:
    """From which folder a script is meant: that of the README, a chapter's for the course, or the root."""
    chapters = sorted(ROOT.glob("[01]*_*")) if readme.parent.name in ("exercises", "lectures") else []
    for folder in (readme.parent, ROOT, *chapters):
        if (folder / script).exists():
            return folder
    raise AssertionError(f"{readme.relative_to(ROOT)}: there is no {script}")


@cache
def repeated() -> list[tuple[Block, Command]]:
    """Commands that run in an earlier block, with the same script."""
    seen, again = set(), []
    for block in blocks():
        here = set()
        for command in (c for c in block.commands if not c.reason):
            script = re.search(r"[\w./]+\.(py|cu)\b", command.run)
            meant = (home(block.readme, script[0]) / script[0]).resolve() if script else ROOT
            key = meant, command.run.replace(script[0], "") if script else command.run
            again += [(block, command)] * (key in seen)
            here.add(key)
        seen |= here
    return again


# ------------------------------------------------------------------------------------- what the scripts say of options


def surroundings() -> dict[str, str]:
    """The environment, without what a `make prove ARGS=...` around this gives to every make inside."""
    given = re.findall(r"(\w+)=", os.environ.get("MAKEFLAGS", ""))
    return {name: value for name, value in os.environ.items() if name not in (*given, "MAKEFLAGS", "MFLAGS")}


def expanded(command: str) -> list[str]:
    """What `make` would do for a command; any other command is itself."""
    words = shlex.split(command)
    if words[0] != "make":
        return [command]
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), f"{command}: the Makefile has no such target"
    unused = [word for word in words[1:] if "=" in word and f"$({word.split('=')[0]})" not in makefile]
    assert not unused, f"{command}: the Makefile does not use {unused}"
    command_line = ["make", "-n", "-o", ".venv/.ready", "-o", ".venv/.book", *words[1:]]
    done = subprocess.run(command_line, cwd=ROOT, env=surroundings(), capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    lines = done.stdout.replace("\\\n", " ").splitlines()
    scripts = [line for line in lines if re.search(r"/(train|launch|course|plan)\.py ", line) and "for " not in line]
    # `make check` names a target, `make check CH=02` calls it.
    return scripts if "train" in words[1] or len(words) > 2 else []


def script_and_options(command: str) -> tuple[str, list[str]] | None:
    """Of `python x.py --a` and `torchrun --nproc_per_node 4 x.py --a`: x.py and `--a`. torchrun checks its own.

    What sbatch is given goes on to another script, so of that only the name is looked at.
    """
    from torch.distributed.run import get_args_parser

    words = [word for word in shlex.split(command) if not re.fullmatch(r"[A-Z_]+=.*", word)]
    words[0] = words[0].rpartition("/")[2]
    if words[0] == "torchrun" or (len(words) > 1 and words[1].endswith("launch.py")):
        given = get_args_parser().parse_args(words[2 if words[0] == "python" else 1 :])
        return given.training_script, given.training_script_args
    if words[0] == "sbatch":
        return words[1], []
    if words[0].startswith("python") and words[1] != "-m":
        return words[1], words[2:]
    if words[0].startswith("python"):
        return words[3], []  # python -m pytest test_x.py
    return None


class Parsed(BaseException):
    """The script has read its options."""


def complaints(asked: list[tuple[str, list[str]]]) -> list[str]:
    """What each script says of its options: "" if it takes them. It ends when it has read them."""
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_end(self, *given, **more):
        parse_args(self, *given, **more)
        raise Parsed

    said, argv, path, folder = [], sys.argv, sys.path[:], os.getcwd()
    argparse.ArgumentParser.parse_args = parse_and_end
    try:
        for script, options in asked:
            complained = io.StringIO()
            sys.argv, sys.path[:] = [script, *options], [str(Path(script).parent), *path]
            try:
                with contextlib.redirect_stderr(complained), contextlib.redirect_stdout(io.StringIO()):
                    runpy.run_path(script, run_name="__main__")
                said.append(f"{script} never read its options")
            except Parsed:
                said.append("")
            except SystemExit as end:
                helped = end.code == 0 and "--help" in options
                what = f"{Path(script).name} {shlex.join(options)} ends with {end.code}: {complained.getvalue()}"
                said.append("" if helped else what)
    finally:
        argparse.ArgumentParser.parse_args = parse_args
        sys.argv, sys.path[:] = argv, path
        os.chdir(folder)
    return said


@cache
def texts_of(script: Path) -> str:
    """Its own, and those of the neighbours that it imports."""
    text = script.read_text()
    beside = [script.parent / f"{name}.py" for name in re.findall(r"(?m)^(?:from|import) (\w+)", text)]
    return text + "".join(file.read_text() for file in beside if file.exists())


def ask(asked: list[tuple[str, list[str]]]) -> list[str]:
    """In a process of its own, which ends: a hundred scripts leave modules and an environment behind (Triton's)."""
    ranks_._pool.stop()
    try:
        return run_ranks(1, complaints, asked, timeout=400)[0]
    finally:
        ranks_._pool.stop()


def questions() -> list[tuple[str, list[str]]]:
    """Every script of a command, with its options."""
    asked = []
    for readme in readmes():
        printed = [command.printed for block in blocks() if block.readme == readme for command in block.commands]
        outside = "".join(re.split(r"(?ms)^```.*?^```$|<!-- .*? -->", readme.read_text()))
        printed += SPAN.findall(outside)
        for command in (part for line in printed for part in line.split(" && ")):
            for one in expanded(re.sub(r" ?\.\.\.(?=[ \"]|$)", "", command)):
                if re.search(r"torchrun|python -c ", one) and not re.search(r"\.py\b", one):
                    continue  # `torchrun --nproc_per_node 8`, of any script; a line of Python
                if found := script_and_options(one):
                    script, options = found
                    where = home(readme, script) / script
                    text = texts_of(where)
                    if where.name.startswith(("_", "bench", "test")) or "parse_args(" not in text:
                        lost = [w for w in options if w.startswith("--") and f'"{w}"' not in text]
                        assert not lost, f"{readme.relative_to(ROOT)}: {command}: no {lost} in {where.name}"
                    else:
                        asked.append((str(where), options))
    return asked


@pytest.mark.prove
def test_every_script_takes_the_options_that_the_readmes_print():
    asked = list(dict.fromkeys((script, tuple(options)) for script, options in questions()))
    said = ask([(script, list(options)) for script, options in asked])
    assert len(asked) > 100 and len(said) == len(asked)
    assert not [line for line in said if line], "\n".join(line for line in said if line)


def test_an_option_that_a_script_has_not_is_named():
    script = str(ROOT / "03_zero/zero.py")
    said = ask([(script, ["--stage", "3"]), (script, ["--stagger", "3"])])
    assert said[0] == "" and "--stagger" in said[1] and "ends with 2" in said[1]


def test_every_command_of_a_readme_is_run_or_says_why_not():
    assert not read()[1], "\n".join(read()[1])


def test_few_commands_are_not_run():
    commands = [command for block in blocks() for command in block.commands]
    left = [command for command in commands if command.reason]
    assert len(commands) > 130 and len(left) < len(commands) / 5


BLOCK = """
<!-- not run: `--gpu` needs a GPU -->
```{}
python x.py --steps 9   # a
python x.py --gpu \\
  --a b|c
```
"""


def test_a_command_without_a_class_is_named():
    [block] = blocks_of(Path("R"), BLOCK.format("sh"))
    assert [command.run for command in block.commands] == [
        "python x.py --steps 9",
        "python x.py --gpu --a b",
        "python x.py --gpu --a c",
    ]
    assert [command.reason for command in block.commands] == ["", "a GPU", "a GPU"]
    with pytest.raises(ValueError, match="R:4: a command in a block that does not begin with ```sh"):
        blocks_of(Path("R"), BLOCK.format(""))
    with pytest.raises(ValueError, match="R:7: is this a command\\? pytorch x.py"):
        blocks_of(Path("R"), BLOCK.format("sh").replace("python x.py --steps", "pytorch x.py --steps"))
    with pytest.raises(ValueError, match="no command of the block has what this is about: not run: `--gpus`"):
        blocks_of(Path("R"), BLOCK.format("sh").replace("`--gpu`", "`--gpus`"))
    with pytest.raises(ValueError, match="the reasons are"):
        blocks_of(Path("R"), BLOCK.format("sh").replace("a GPU", "patience"))
    with pytest.raises(ValueError, match="R:3: a comment about commands, and no block"):
        blocks_of(Path("R"), BLOCK.format("sh").replace("\n```sh", "\nWords.\n```sh"))
    [block] = ruled(["make x --n 9"], [("shortened", "`9` to `2`"), ("ends with 2", "`--n`")]).commands
    assert (block.run, block.code) == ("make x --n 2", 2)


# ------------------------------------------------------------------------------------------------------ run as printed


def ends(command: str, folder: Path, timeout: float = 900, first: str = "") -> tuple[int, str]:
    """Exit code and what was said. At the end nothing of it is left running. `first` is searched for programs first."""
    bin_ = f"{folder}/.venv/bin" if (folder / ".venv").exists() else str(Path(sys.executable).parent)
    kept = {k: v for k, v in surroundings().items() if k not in ("PYTHONPATH", "PROVE", "FRESH_MODULES", "RANKS_UNIT")}
    environment = {k: v for k, v in kept.items() if not k.startswith(("PYTEST", "COV"))}
    environment |= {
        "OMP_NUM_THREADS": "1",
        "PATH": f"{first or bin_}:{Path(sys.executable).parent}:{bin_}:{os.environ['PATH']}",
    }
    environment |= {"PYTHONDONTWRITEBYTECODE": ""}  # ranks and later commands find what the first has compiled
    job = subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = job.communicate(timeout=timeout)
        return job.returncode, said
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGTERM)  # torchrun's ranks are in sessions of their own: it has to end them
        with contextlib.suppress(subprocess.TimeoutExpired):
            return 124, job.communicate(timeout=60)[0]
        os.killpg(job.pid, signal.SIGKILL)
        return 124, job.communicate()[0]


@pytest.mark.prove
def test_a_command_that_takes_too_long_leaves_no_rank_behind(tmp_path):
    unit = ranks_._pool.unit
    # One write for a number and its newline: ranks share the pipe, and between two writes of one another may write.
    script = f"import os, time\nos.write(1, b'%d\\n' % os.getpid())\ntime.sleep({100 * unit})\n"
    (tmp_path / "long.py").write_text(script)
    before = time.monotonic()
    code, said = ends("torchrun --standalone --nproc_per_node 2 long.py", tmp_path, timeout=15 * unit)
    assert code == 124 and time.monotonic() - before < 60 * unit
    ranks = [int(line) for line in said.splitlines() if line.isdigit()]
    assert len(ranks) == 2
    for rank in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(rank, 0)


def warmed(copy: Path) -> str:
    """The folder of programs that have imported torch; `make` finds them in the copy."""
    folder = warm_python.folder()
    for program in ("python", "python3", "torchrun"):
        (copy / ".venv" / "bin" / program).unlink(missing_ok=True)
        (copy / ".venv" / "bin" / program).symlink_to(f"{folder}/{program}")
    return folder


@pytest.mark.prove
@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=name_of(block), marks=[pytest.mark.chapter(block.readme.relative_to(ROOT).parts[0][:2])])
        for block in blocks()
        if any(not command.reason and (block, command) not in repeated() for command in block.commands)
    ],
)
def test_a_block_of_commands_runs_as_printed_and_ends_as_its_readme_says(block, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=NO_COPY, symlinks=True)
    (copy / ".venv" / "bin").mkdir(parents=True)
    for file in [*set(Path(sys.prefix).iterdir()) - {Path(sys.prefix, "bin")}, *Path(sys.prefix, "bin").iterdir()]:
        (copy / ".venv" / file.relative_to(sys.prefix)).symlink_to(file)
    for requirements in copy.glob("**/requirements.txt"):
        os.utime(requirements, (0, 0))  # older than what was installed: no network is needed
    for command in block.first:
        assert ends(command, copy)[0] == 0, command
    warm = "" if name_of(block).endswith("-1") else warmed(copy)
    for command in block.commands:
        if command.reason or (block, command) in repeated():
            continue
        script = re.search(r"[\w./]+\.(py|cu)\b", command.run)
        made = script and (copy / script[0]).exists()
        folder = copy if not script or made else copy / home(block.readme, script[0]).relative_to(ROOT)
        if shlex.split(command.run)[0] in ("nvcc", "g++") and not shutil.which(shlex.split(command.run)[0]):
            pytest.skip(reason=f"no {shlex.split(command.run)[0]} here")
        code, said = ends(command.run, folder, first=warm)
        assert code == command.code, f"{command.run}\nended with {code}:\n{said[-3000:]}"
        warm = warm or warmed(copy)
