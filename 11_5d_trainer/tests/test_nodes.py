"""Two machines in one: two network namespaces with a cable between them, and what crosses it in a step.

Linux lets root give processes a network of their own. The ranks of one namespace reach each other by its loopback, the
others by the cable alone (a veth pair), and the kernel counts what each end has sent: a meter that knows nothing of the
trainer, of its formulas or of gloo's algorithms. Where namespaces are not allowed the test is skipped and says why.
"""

import dataclasses
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import paths  # noqa: F401  finds the chapters below
import fuzz
import pytest
import torch
import train
from harness.ranks import run_ranks
from harness.reference import assert_same
from plan_memory import Layout
from plan_traffic import flows
from test_ends import free_port
from test_launch import start, steps_of

PREFIX = "trainer-node-"  # then the process that made it, and a letter
CABLE = "cable"  # what both ends are called
SIZES = dataclasses.replace(fuzz.SIZES, hidden=128, intermediate=384)
STEPS = 4


def ip(*words: str) -> str:
    """What iproute2's `ip` says. Skips the test with its reason, if it cannot do that here."""
    try:
        return subprocess.run(["ip", *words], capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        pytest.skip(reason="there is no `ip` here, which makes network namespaces (iproute2)")
    except subprocess.CalledProcessError as error:
        pytest.skip(reason=f"no network namespaces here: ip {' '.join(words)}: {error.stderr.strip()}")


def remove(name: str) -> None:
    """End whatever is left in a namespace, and remove it; its end of the cable goes with it, and so the other end."""
    for pid in subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split():
        os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "delete", name], check=True)


def names() -> list[str]:
    return [line.split()[0] for line in ip("netns", "list").splitlines() if line.startswith(PREFIX)]


@contextmanager
def two_nodes() -> Iterator[list[str]]:
    """Two namespaces, 10.77.0.1 and 10.77.0.2. Those of a test that was killed are removed by the next."""
    for name in names():
        if not os.path.exists(f"/proc/{name.removeprefix(PREFIX).split('-')[0]}"):
            remove(name)
    mine = [f"{PREFIX}{os.getpid()}-{letter}" for letter in "ab"]
    try:
        for name in mine:
            ip("netns", "add", name)
        ip("link", "add", CABLE, "netns", mine[0], "type", "veth", "peer", "name", CABLE, "netns", mine[1])
        for i, name in enumerate(mine):
            ip("-n", name, "address", "add", f"10.77.0.{i + 1}/24", "dev", CABLE)
            for device in ("lo", CABLE):
                ip("-n", name, "link", "set", device, "up")
        yield mine
    finally:
        for name in set(mine) & set(names()):
            remove(name)


COUNTED = """
import dataclasses, json
from pathlib import Path
import torch.distributed as dist
PRESETS["tiny"] = dataclasses.replace(fuzz.SIZES, hidden={sizes.hidden}, intermediate={sizes.intermediate})
crossed, step = [], train.train_step
def sent():
    dist.barrier()  # every rank has what it waited for, so all of it has left
    count = int(Path("/sys/class/net/{cable}/statistics/tx_bytes").read_text())
    dist.barrier()  # nobody sends before everyone has read
    return count
def counted(*args):
    before = sent()
    result = step(*args)
    crossed.append(sent() - before)
    Path(f"{folder}/crossed-{{os.environ['RANK']}}.json").write_text(json.dumps(crossed))
    return result
train.train_step = counted
"""


@pytest.mark.prove
def test_on_two_nodes_losses_are_those_of_one_process_and_what_crosses_the_cable_is_what_data_parallel_sends(
    text, tmp_path
):
    alone = fuzz.options(text, "", steps=STEPS, timeout=120)
    words = [*alone, "--tp", "2", "--zero", "1", "--out", str(tmp_path / "run")]  # which both see, as on a cluster
    with mock.patch.dict(train.PRESETS, tiny=SIZES):
        plan = train.prepare(words, 4)
    change = COUNTED.format(sizes=SIZES, cable=CABLE, folder=tmp_path)
    with two_nodes() as nodes:
        meeting = ["--nnodes", "2", "--nproc_per_node", "2", "--master_addr", "10.77.0.1"]
        meeting += ["--master_port", str(free_port())]
        agents = []
        try:
            for i, node in enumerate(nodes):
                inside = ["ip", "netns", "exec", node, "env", f"GLOO_SOCKET_IFNAME={CABLE}"]
                agents.append(start(tmp_path, change, words, nodes=[*meeting, "--node_rank", str(i)], inside=inside))
            said = [agent.communicate(timeout=300)[0] for agent in agents]
        finally:
            for agent in agents:  # one alone would wait for the other
                agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], said
    one_process = fuzz.losses(run_ranks(1, fuzz.run, [*alone, "--out", str(tmp_path / "one")], SIZES)[0])
    losses = steps_of(tmp_path / "run")
    assert losses.keys() == one_process.keys() and len(losses) == STEPS
    for step, want in one_process.items():
        got = torch.tensor(losses[step], dtype=torch.float64)
        assert_same(got, torch.tensor(want, dtype=torch.float64), 1e-9, f"loss and norm of step {step}")
    sent = flows(plan.model, None, Layout.of(plan.config, plan.model, 4), p2p_reduce=True)
    across, inside = (2 * sum(flow.wire for flow in sent if (flow.axis == "tp") == way) for way in (False, True))
    assert inside > 0.2 * across  # enough to be seen, if it crossed too
    for rank in range(4):
        crossed = json.loads((tmp_path / f"crossed-{rank}.json").read_text())
        assert len(crossed) == STEPS
        # Headers, acknowledgements and barriers come on top; TCP sends 64 KB again when an acknowledgement is late.
        assert across <= min(crossed) <= 1.005 * across, f"rank {rank}: {crossed}, not {across:,.0f}"
        assert max(crossed) <= 1.1 * across, f"rank {rank}: {crossed}, not {across:,.0f}"
