"""Lines and files by kind: what teaches or trains, what proves it, and what is generated.

.venv/bin/python tests/weight.py                    # this commit
.venv/bin/python tests/weight.py edition-2 HEAD     # any commits, one below the other
"""

import collections
import subprocess
import sys
from pathlib import Path, PurePath

PROOF = ("tests", "benchmarks", "planted mistakes")
LESSON = ("code", "text")


def git(*words: str) -> bytes:
    done = subprocess.run(["git", "-C", str(Path(__file__).parents[1]), *words], capture_output=True)
    if done.returncode:
        sys.exit(f"weight.py: {done.stderr.decode().strip()}")
    return done.stdout


def kind_of(path: PurePath) -> str:
    if path.suffix in (".svg", ".json", ".ipynb"):
        return "generated"
    if path.name in ("mistakes.toml", "cheats.toml") or (path.suffix == ".toml" and "exercises" in path.parts):
        return "planted mistakes"
    if path.name.startswith("bench_"):
        return "benchmarks"
    if path.name.startswith("test_") or "tests" in path.parts or path.name == "conftest.py":
        return "tests"
    if path.suffix == ".md":
        return "text"
    if path.suffix in (".py", ".cu"):
        return "code"
    return "other"


def main() -> None:
    for revision in sys.argv[1:] or ["HEAD"]:
        lines: collections.Counter[str] = collections.Counter()
        files: collections.Counter[str] = collections.Counter()
        for name in git("ls-tree", "-r", "--name-only", "-z", revision).decode().split("\0")[:-1]:
            kind = kind_of(PurePath(name))
            lines[kind] += git("show", f"{revision}:{name}").count(b"\n")
            files[kind] += 1
        print(f"{revision}: {files.total()} files, {lines.total() - lines['generated']} lines kept by hand")
        for kind, count in lines.most_common():
            print(f"  {kind:<17} {count:7} lines  {files[kind]:4} files")
        proof, lesson = (sum(lines[kind] for kind in kinds) for kinds in (PROOF, LESSON))
        print(f"  proof to lesson: {proof / lesson:.2f} to 1")


if __name__ == "__main__":
    main()
