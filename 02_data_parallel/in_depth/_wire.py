"""Count the bytes that an all-reduce puts on the wire: the operating system's counter, in a separate network.

A meter of torch.distributed's calls sees the *input* of an all-reduce, and needs an algorithm's formula,
2(P-1)/P times that, for the bytes sent. Here nothing is assumed. `count` starts this file by `unshare -rn`,
with a loopback interface of its own; P processes sum a tensor, and /proc/net/dev has the bytes sent.
"""

import fcntl
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import torch.distributed as dist
from collectives import COLLECTIVES
from harness.meter import loopback_bytes

SIOCGIFFLAGS = 0x8913
SIOCSIFFLAGS = 0x8914
IFF_UP = 1  # Linux, include/uapi/linux/sockios.h and if.h


def why_not() -> str:
    """The reason why bytes cannot be counted here, or "" if they can."""
    if sys.platform != "linux" or shutil.which("unshare") is None:
        return "needs Linux and its command unshare"
    done = subprocess.run(["unshare", "-rn", "true"], capture_output=True, text=True)
    return f"this system forbids network namespaces: {done.stderr.strip()}" if done.returncode else ""


def count(ranks: int, numel: int) -> dict[str, int]:
    """Bytes on the wire by collective, all ranks, with headers and two barriers, for one sum of `numel` float32."""
    command = ["unshare", "-rn", sys.executable, __file__, str(ranks), str(numel)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(f"counting bytes failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        flags = struct.unpack("16sh", fcntl.ioctl(any_socket, SIOCGIFFLAGS, struct.pack("16sh", b"lo", 0)))[1]
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh", b"lo", flags | IFF_UP))


def one_rank(rank: int, ranks: int, numel: int, store: str) -> dict[str, int]:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=limit)
    found = {}
    for name in ("all_reduce_ring", "all_reduce_tree", "all_reduce_naive", "torch"):
        x = torch.ones(numel)
        run = dist.all_reduce if name == "torch" else COLLECTIVES[name]
        run(x, group=dist.group.WORLD)  # the first call opens connections
        dist.barrier()
        before = loopback_bytes()
        dist.barrier()  # no rank begins before all have read
        run(x, group=dist.group.WORLD)
        dist.barrier()
        found[name] = loopback_bytes() - before
        dist.barrier()
    dist.destroy_process_group()
    return found


def main() -> None:
    ranks = int(sys.argv[1])
    numel = int(sys.argv[2])
    loopback_up()
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(1, ranks):
            child = os.fork()  # torch is imported once
            if child == 0:
                one_rank(rank, ranks, numel, f"{folder}/store")
                os._exit(0)
            children.append(child)
        found = one_rank(0, ranks, numel, f"{folder}/store")
        failed = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(failed):
        sys.exit(f"ranks ended with {failed}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
