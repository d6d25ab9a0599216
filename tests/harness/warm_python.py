"""A `python` and a `torchrun` that start without the seconds that importing torch takes.

    environment["PATH"] = f"{warm_python.folder()}:{environment['PATH']}"     # python, python3 and torchrun

Each is a client, which sends its arguments, environment, working directory and open files to a server that has imported
torch. The server forks. The fork runs the script, and the client waits, passes signals on and ends as the fork ends. In
the fork `sys.executable` is the client again, so the ranks of torchrun and of torch.multiprocessing start in this
way too.

    the command                the server                     the fork
    -----------                ----------                     --------
    arguments, files -------->  fork -----------------------> runs the script
    signal ------------------------------------------------>  gets it
    ends  <----------------------------------- exit code      ends

It does not test the start of Python or the import of torch, and all forks share one hash seed. So whoever uses it
starts something for real as well. Options of Python other than -u, -B, -m and -c, other variables PYTHON... and other
numbers of threads than one start the real Python.
"""

import itertools
import json
import os
import signal
import socket
import sys

CLIENT = '#!/bin/sh\nexec "{python}" -I -S "{file}" "{address}" "{python}" "$0" "$@"\n'
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


# ------------------------------------------------------------------------------------------------------- the client


def client(address: str, python: str, me: str, words: list[str]) -> int:
    """The exit code of the fork; -n if signal n ended it. Does not return where the real Python has to start."""
    if os.path.basename(me) == "torchrun":
        words = ["-m", "torch.distributed.run", *words]
    odd = {name for name in os.environ if name.startswith("PYTHON")} - {"PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"}
    options = list(itertools.takewhile(lambda word: word in ("-u", "-B"), words))
    for option in options:  # those that are variables too
        os.environ[{"-u": "PYTHONUNBUFFERED", "-B": "PYTHONDONTWRITEBYTECODE"}[option]] = "1"
    words = words[len(options) :]
    known = words and (words[0] in ("-m", "-c") or not words[0].startswith("-"))
    if odd or not known or os.environ.get("OMP_NUM_THREADS") != "1":
        os.execv(python, [python, *words])
    files = [int(name) for name in os.listdir("/dev/fd")]
    files = [number for number in files if is_open(number)]
    server = socket.socket(socket.AF_UNIX)
    server.connect(address)
    asked = json.dumps([files, os.path.join(os.path.dirname(me), "python"), words, dict(os.environ), os.getcwd()])
    socket.send_fds(server, [len(asked.encode()).to_bytes(8, "big")], files)
    server.sendall(asked.encode())
    for number in PASSED_ON:
        signal.signal(number, lambda received, _: server.sendall(bytes([received])))
    answer = server.recv(16)
    return int(answer) if answer else 1


def is_open(number: int) -> bool:
    """Listing the open files opens one more, which is closed by now."""
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


# ------------------------------------------------------------------------------------------------------- the server


def serve(address: str) -> list:
    """Fork for each client. Returns in the forks only, with what the client has asked for."""
    import gc
    import importlib
    import select

    from module_cache import PRELOAD

    for module in [*PRELOAD, "torch.distributed.run", "torch.multiprocessing.spawn"]:
        importlib.import_module(module)
    del sys.path[0]  # this folder
    gc.collect()
    gc.freeze()  # no fork scans, and so copies, these objects
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended forks leave nothing behind
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(100)
    while True:
        ready, _, _ = select.select([listener.fileno(), 0], [], [])
        if 0 in ready:  # whoever started this server has ended
            sys.exit(0)
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return keep(connection)
        connection.close()


def keep(connection: socket.socket) -> list:
    """Fork again, wait for that fork, and tell the client how it ended. Returns in the new fork."""
    import threading

    head, files, _, _ = socket.recv_fds(connection, 8, 250)
    size, asked = int.from_bytes(head, "big"), b""
    while len(asked) < size:
        asked += connection.recv(size - len(asked))
    fork = os.fork()
    if fork == 0:
        connection.close()
        os.setsid()
        return [files, *json.loads(asked)]

    def pass_on() -> None:
        try:
            while received := connection.recv(1):
                os.kill(fork, received[0])
            os.killpg(fork, signal.SIGKILL)  # the client has been killed
        except (ProcessLookupError, ConnectionResetError):
            pass

    for number in files:
        os.close(number)
    threading.Thread(target=pass_on, daemon=True).start()
    _, status = os.waitpid(fork, 0)
    try:
        connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    finally:
        os._exit(0)


# --------------------------------------------------------------------------------------------------------- the fork


def run(files: list[int], numbers: list[int], me: str, words: list[str], environment: dict, folder: str) -> None:
    """Become `python WORDS` with these open files, under the numbers that they have at the client."""
    import fcntl
    import io
    import runpy
    from types import ModuleType

    above = [fcntl.fcntl(file, fcntl.F_DUPFD, 300) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(above, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    unbuffered = bool(environment.get("PYTHONUNBUFFERED"))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    out, err = (os.fdopen(number, "wb", 0 if unbuffered else -1, closefd=False) for number in (1, 2))
    sys.stdout = io.TextIOWrapper(out, line_buffering=os.isatty(1), write_through=unbuffered)
    sys.stderr = io.TextIOWrapper(err, errors="backslashreplace", line_buffering=True, write_through=unbuffered)
    sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
    sys.executable = me
    main = ModuleType("__main__")
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, folder)
        sys.modules.pop(words[1], None)
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.modules["__main__"] = main
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        exec(compile(words[1], "<string>", "exec"), vars(main))
        return
    sys.argv = words
    sys.path.insert(0, os.path.dirname(os.path.realpath(words[0])))
    main.__file__ = os.path.abspath(words[0])
    with open(words[0], "rb") as script:
        exec(compile(script.read(), words[0], "exec"), vars(main))


# ------------------------------------------------------------------------------------------------------ for the tests


def folder() -> str:
    """A folder with `python`, `python3` and `torchrun`. Its server ends with this process."""
    import atexit
    import subprocess
    import tempfile
    import time

    global _started
    if _started is None:
        place = tempfile.TemporaryDirectory(prefix="warm-")
        address = f"{place.name}/socket"
        for name in ("python", "python3", "torchrun"):
            path = f"{place.name}/{name}"
            with open(path, "w") as file:
                file.write(CLIENT.format(python=sys.executable, file=os.path.abspath(__file__), address=address))
            os.chmod(path, 0o755)
        plain = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FAKE_", "TRITON"))
        }
        server = subprocess.Popen(
            [sys.executable, __file__, address],
            stdin=subprocess.PIPE,
            env=plain | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        deadline = time.monotonic() + 120
        while not os.path.exists(address):
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server at {address} did not start")
            time.sleep(0.05)

        def end() -> None:
            server.kill()
            server.wait()
            place.cleanup()

        atexit.register(end)
        _started = place.name
    return _started


_started: str | None = None

if __name__ == "__main__" and len(sys.argv) == 2:
    run(*serve(sys.argv[1]))
elif __name__ == "__main__":
    code = client(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)
