"""The trainer: a Llama on real data on many ranks, every technique imported from the chapter that teaches it.

    options.py     every option, and what fits        paths.py       finds the chapters' folders
    mesh.py        the grid of ranks and its groups   model.py       a rank's part of the model: chapters 01, 04, 05
    step.py        one step of one rank               gradients.py   sums over ranks, norm, update: 02, 03
    data.py        tokens to micro-batches            full_state.py  unsharded tensors, to save and to load
    sources.py     what is on disk                    prepare.py     your own data to tokens
    checkpoint.py  save, find, load                   curve.py       the loss curve

    python 11_5d_trainer/train.py                                       one rank
    torchrun --nproc_per_node 4 11_5d_trainer/train.py                  4 data-parallel ranks: NCCL, else Gloo
    torchrun --nproc_per_node 8 11_5d_trainer/train.py --tp 2 --sequence-parallel --cp 2 --cp-kind zigzag --zero 2
    torchrun --nproc_per_node 4 11_5d_trainer/train.py --data my.txt --steps 2000 --seq-len 256 --out runs/mine
    torchrun --nproc_per_node 8 11_5d_trainer/train.py --pp 2 --schedule zb-h1 --tp 2 --zero 1
    torchrun --nproc_per_node 2 11_5d_trainer/train.py --resume runs/mine --steps 3000
    python 11_5d_trainer/train.py --options 11_5d_trainer/examples/laptop.toml

It writes into the run's folder: config.json, log.jsonl (one line per step and per validation), checkpoints/ and, at
the end, sample.txt and loss.svg. Its last line is the summary: validation loss from first to last, steps, seconds.
"""

import contextlib
import dataclasses
import gc
import json
import math
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import IO, Any

if __name__ == "__main__":  # Ctrl-C during the slow imports below prints no traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import paths  # noqa: F401  finds the chapters below
import checkpoint
import curve
import torch
import torch.distributed as dist
import torch.distributed.nn  # first imported while a group is up, it would keep that group until the end
from accounting import peak_flops, step_flops
from checks import check_compile, check_kernels, check_memory
from data import BadToken, Corpus, Sampler, load_corpus
from full_state import load_full_state, share_of_state
from generate import generate, load_model, trained_length
from hf import check_weights, keep_origin, read_sizes
from llama import LlamaConfig
from mesh import picture
from metrics import Watch, check_boards, peak_memory
from model import EXPERTS, PRESETS, full_shapes, is_adapter
from ops import weight_dtype
from options import SIZES, Config, NothingLeft, RunEnds, UsageError, check_folder, flag, fresh, merge, parse, settle
from sources import as_numbers
from step import (
    Batch,
    NotFinite,
    Reading,
    Trainer,
    has_bf16,
    launch_step,
    make_trainer,
    reads_late,
    sent_to,
    train_step,
    validate,
    wait_for_weights,
    who_is_not_finite,
)
from torch.distributed.rendezvous import rendezvous
from tqdm import tqdm

if __name__ == "__main__":  # from here on main handles Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

Log = dict[str, Any]
SILENCE = 10.0  # seconds between two printed steps where there is no progress bar
GRACE = 5.0  # seconds within which all ranks that wait for a stuck rank reach their timeouts


# ----------------------------------------------------------------------------------- before any process group


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that a run needs, checked before ranks are connected."""

    config: Config
    corpus: Corpus
    model: LlamaConfig
    device: torch.device
    resume: tuple[Path, Path, checkpoint.Progress] | None
    messages: list[str]  # for the user
    lock: IO[str] | None = None  # of the run's folder; on rank 0, once all ranks are connected

    @property
    def start_from(self) -> str:
        """The folder of the first weights, or "": a checkpoint has its own."""
        return "" if self.resume else self.config.init


def prepare(arguments: list[str], world_size: int, local_rank: int = 0) -> Plan:
    """Options, data and checkpoint, each checked. Raises UsageError with one line for the user."""
    given = parse(arguments)
    resume = None
    messages: list[str] = []
    written: list[Path] = []
    if given.get("restart"):
        if not given.get("out"):
            raise UsageError("--restart goes on with the run in --out, which is missing; add --out FOLDER")
        if given.get("resume"):
            raise UsageError(f"--restart goes on with --out, not with --resume {given['resume']}; leave one out")
        written = checkpoint.complete(Path(given["out"]))
        if written:
            given["resume"] = given.pop("out")
    if given.get("resume"):
        run, path, progress, messages = checkpoint.find(given["resume"])
        resume = run, path, progress
    config = merge(resume[2].config, given, str(resume[1])) if resume else fresh(given)
    config.check()
    if config.evaluate and not (resume or config.init):
        raise UsageError("--evaluate needs something to validate; add --resume RUN or --init FOLDER")
    if resume and resume[2].step >= config.steps and not config.evaluate:
        if given.get("restart"):
            raise NothingLeft(f"--restart: {resume[1]} has done all {config.steps} steps; nothing is left to do")
        raise UsageError(f"--steps {config.steps}: {resume[1]} has done {resume[2].step} already; ask for more")
    device = find_device(config.device, local_rank)
    check_boards(config)
    corpus = read_data(config, given, resume)
    messages = [*messages, *corpus.messages]
    if resume:
        sizes = LlamaConfig(**resume[2].sizes)
    else:
        config, sizes = choose_sizes(config, given, corpus.vocab_size)
        config.check_experts(sizes, config.dp(world_size) * config.cp)  # before they are counted
        count = sum(elements_of(sizes, config).values())
        bf16 = has_bf16() if device.type == "cuda" else None
        config, said = settle(config, given, count, world_size, bf16)
        config.check()
        messages += said
    config.check_heard(given, sizes)
    config.check_layout(sizes, world_size)
    if not config.show_mesh:
        check_memory(config, sizes, world_size, device)
        folder = "" if config.evaluate else config.out or (resume and resume[0])
        waited = folder and checkpoint.check_free(Path(folder), config.restart)
        now = checkpoint.complete(Path(folder)) if folder and config.restart else []
        if waited or {path.name for path in now} - {path.name for path in written}:
            return prepare(arguments, world_size, local_rank)  # from what has been written meanwhile
    if not (config.evaluate or config.show_mesh or resume):
        check_apart(config)
    if config.out and not config.evaluate:
        check_folder(config.out, config.restart)
    check_kernels(config, sizes, device)
    check_compile(config, sizes, world_size, device)
    if config.kernels == "triton" and device.type == "cpu":
        messages.append("--kernels triton runs in Triton's interpreter on a CPU: right, and thousands of times slower")
    return Plan(config, corpus, sizes, device, resume, messages)


def read_data(config: Config, given: dict[str, Any], resume: tuple | None) -> Corpus:
    """The training data. A resumed run must find the same tokens, which may have moved; else UsageError."""
    if not resume:
        return load_corpus(config)
    run, path, progress = resume
    where = f"--data {config.data or '(the standard library)'}"
    old = progress.config.get("data", "")
    if "data" not in given and old and not Path(old).exists():
        raise UsageError(f"--resume {config.resume}: its --data {old} is not there; if it has moved, say --data PLACE")
    kept = run / "tokenizer"  # the run's own copy
    own = config.tokenizer and "tokenizer" not in given and kept.exists()
    corpus = load_corpus(dataclasses.replace(config, tokenizer=str(kept)) if own else config)
    if config.evaluate and "data" in given:  # any data that the model can read
        if progress.numbers and corpus.tokenizer:
            raise UsageError(
                f"{where} is not bare token ids, on which {run} was trained; give ids of the same tokenizer"
            )
        reads_bytes = corpus.tokenizer is None or corpus.tokenizer.name == "bytes"
        if corpus.vocab_size > progress.sizes["vocab_size"] or (kept / "tokenizer.json").exists() == reads_bytes:
            raise UsageError(f"{where} was not made with the tokenizer of {run}, which is in {kept}")
        return corpus
    if progress.tokens != corpus.size:
        raise UsageError(
            f"--resume {config.resume}: it was trained on {progress.tokens:,} tokens, but {where} now has "
            f"{corpus.size:,}; restore it, or start a new run"
        )
    if not progress.data and config.data != old:  # no fingerprint to compare
        raise UsageError(f"--data {config.data} does not fit {path}, which was trained with {old}; leave it out")
    if progress.data not in ("", corpus.fingerprint):
        raise UsageError(f"--resume {config.resume}: {where} has other contents or weights than it had then")
    return corpus


def check_apart(config: Config) -> None:
    """Raise UsageError if a run would write into its own text or over the model that it starts from."""
    folder = Path(config.out or "runs").resolve()
    data = Path(config.data).resolve()
    prepared = any((data / name).exists() for name in ("train.bin", "mixture.json"))
    if config.data and data.is_dir() and not prepared and folder.is_relative_to(data):
        what = f"--out {config.out or folder} lies in --data {config.data}"
        raise UsageError(f"{what}, whose text it would be; use another folder")
    if config.init and folder == Path(config.init).resolve():
        raise UsageError(f"--out {config.out} is --init {config.init}, whose config.json would be lost; use another")


def choose_sizes(config: Config, given: dict[str, Any], vocab_size: int) -> tuple[Config, LlamaConfig]:
    """The sizes of a new model, from a preset or a Hugging Face config.json, overridden by single options.

    The file's experts become part of the options. Raises UsageError where an option contradicts the file.
    """
    own = {name: getattr(config, name) for name in SIZES if getattr(config, name)}
    own |= {"tied": config.tied} if "tied" in given else {}
    source = f"--init {config.init}" if config.init else f"--config {config.config}"
    if config.init or config.config:
        barred = ["preset", "config", *SIZES, "tied", "experts", "top_k"] if config.init else ["preset"]
        sizes, (experts, top_k) = read_sizes(config.init or config.config, source.split()[0])
        found = dataclasses.asdict(sizes) | {"experts": experts, "top_k": top_k}
        barred += ["experts", "top_k"] if experts else []
        for name in barred:
            if name in given and given[name] != found.get(name):
                raise UsageError(f"{flag(name)} {given[name]} cannot go with {source}, which decides it; leave it out")
        if experts or config.init:
            config = dataclasses.replace(config, experts=experts, top_k=top_k or config.top_k)
        if vocab_size > sizes.vocab_size:
            raise UsageError(
                f"{source} knows {sizes.vocab_size} tokens and the data has {vocab_size}; add its --tokenizer"
            )
    else:
        sizes = dataclasses.replace(PRESETS[config.preset], vocab_size=vocab_size)
        if config.preset in EXPERTS and not config.experts:
            experts, top_k = EXPERTS[config.preset]
            config = dataclasses.replace(config, experts=experts, top_k=given.get("top_k", top_k))
    try:
        sizes = dataclasses.replace(sizes, **own)
    except ValueError as error:
        raise UsageError(f"{', '.join(f'{flag(name)} {value}' for name, value in own.items())}: {error}") from None
    if config.init:
        check_weights(config.init, full_shapes(sizes, config.mixture(sizes)))
    if config.lora_rank:
        scale = config.lora_alpha / config.lora_rank
        sizes = dataclasses.replace(sizes, lora_rank=config.lora_rank, lora_scale=scale)
    return config, sizes


def elements_of(sizes: LlamaConfig, config: Config) -> dict[str, int]:
    """How many elements each parameter of the full model has. Routers' biases, which count steps, are none."""
    full = full_shapes(sizes, config.mixture(sizes))
    return {name: tensor.numel() for name, tensor in full.items() if tensor.is_floating_point()}


def find_device(asked: str, local_rank: int) -> torch.device:
    if asked == "mps":
        why = (
            "Apple's GPU has no float64, in which losses and norms are summed, and neither Gloo nor NCCL sends from it"
        )
        raise UsageError(f"--device mps: {why}; use --device cpu")
    if asked not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--device {asked}: use auto, cpu or cuda")
    gpus = torch.cuda.device_count() if asked != "cpu" else 0
    if asked == "cuda" and not gpus:
        raise UsageError("--device cuda: there is no GPU here; use --device cpu")
    here = int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1))  # so that all ranks fail, not some
    if gpus and here > gpus:
        what = f"--nproc_per_node {here} is more than the {gpus} GPU(s) of this machine"
        raise UsageError(f"{what}; start {gpus}, one for each, or use --device cpu")
    return torch.device("cuda", local_rank) if gpus else torch.device("cpu")


def connect(device: torch.device, timeout: float) -> None:
    """Join torchrun's world, or start one of a single rank. Collectives fail after `timeout` seconds."""
    limit = timedelta(seconds=timeout)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = False  # the default, unless the environment differs
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        store, rank, size = next(rendezvous("env://", timeout=limit))
        store.set_timeout(limit)
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # torchrun's store outlives a restart and still has the addresses of dead ranks. Of several nodes
            # each counts its own restarts: there only launch.py helps, which makes a new store each time.
            store = dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        own: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit, **own)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=limit)


# -------------------------------------------------------------------------------------------------- training


def learning_rate(step: int, config: Config) -> float:
    """Linear warm-up to `lr`, then half a cosine down to `min_lr` at the last step; or warm-up, stable, decay (wsd):
    constant until the last `decay_steps`, in which it falls as 1 minus a square root (2405.18392)."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    if config.lr_schedule == "wsd":
        decay = config.decay_steps or max(1, min(config.steps // 5, config.steps - config.warmup))
        left = max(0, config.steps - 1 - step)
        return config.min_lr + (config.lr - config.min_lr) * (1 - math.sqrt(max(0, decay - left) / decay))
    done = (step - config.warmup) / max(1, config.steps - 1 - config.warmup)
    return config.min_lr + 0.5 * (config.lr - config.min_lr) * (1 + math.cos(math.pi * min(done, 1.0)))


class Stop:
    """Whether a signal asked the run to end. The first lets the step end; a second Ctrl-C does not wait."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, number: int, frame: Any) -> None:
        if self.asked and number == signal.SIGINT:
            os._exit(130)  # other ranks may be in the middle of a collective: do not wait for them
        self.asked = True


def any_rank(me: Trainer, *flags: bool) -> Reading:
    """Each flag, set if any rank has set it, so that all ranks decide alike. A signal, for example, does not
    reach all ranks in the same step."""
    votes = sent_to(me.device, torch.tensor([int(flag) for flag in flags]))
    dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=me.mesh.groups["world"])
    return Reading(votes)


@dataclasses.dataclass
class Launched:
    """A step that has been launched, and what its line in the log needs besides its loss and its norm."""

    step: int
    lr: float
    samples: int  # used up to and including this step
    batches: list[Batch]
    start: float
    found: Any  # loss and norm: a Reading, or the two numbers


def train(plan: Plan, folder: Path, stop: Stop | None = None) -> list[Log]:
    """Train as planned on all ranks of the world, writing into `folder`. Returns the log's lines."""
    config = plan.config
    stop = stop or Stop()
    run = Run(plan, folder)
    me = run.me
    first = run.first
    if first == 0:
        run.evaluate(0)
    run.begin()
    late = reads_late(me)  # the host then reads a step's results after it launched the next one
    under_way: Launched | None = None
    asked: Reading | None = None  # the vote of the step before
    for step in run.bar:
        start = time.perf_counter()
        lr = learning_rate(step, config)
        for parameters in (group for owner in me.owners for group in owner.param_groups):
            parameters["lr"] = lr
        batches = run.next_batches()
        with run.watch.step(step):
            found: Any  # two numbers, or a Reading of them
            if late:
                found = launch_step(me, batches, since=under_way.found.done if under_way else None)
            else:
                found = train_step(me, batches)
        if under_way:
            run.arrive(under_way)
        under_way = launched = Launched(step, lr, run.training.position, batches, start, found)
        vote = any_rank(me, stop.asked, run.saver.busy())
        stopped, writing = (asked if late and asked is not None else vote).values()
        asked = vote
        end = step + 1 == config.steps
        evaluating = end or (config.eval_every and (step + 1) % config.eval_every == 0)
        saving = end or stopped or (config.save_every and (step + 1) % config.save_every == 0)
        if not late or step == first or evaluating or saving:  # what follows needs its weights
            run.arrive(launched)
            under_way = None
        if not writing:
            run.saver.finish()  # renames the complete checkpoint
        val_loss, best = run.evaluate(step + 1) if evaluating else (None, False)
        if saving or (best and config.keep_best):
            run.save(step + 1, val_loss)
            asked = None  # an older vote does not cover the save that begins now
        if stopped:
            break
    return run.end(early=bool(stopped) and not end)


class Run:
    """What a run has besides its trainer: data, log, checkpoints. All ranks call its methods together."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.config = plan.config
        self.folder = folder
        config = plan.config
        self.leader = dist.get_rank() == 0
        me = make_trainer(config, plan.model, plan.device, start_from=plan.start_from)
        cut = (config.seq_len, plan.corpus.vocab_size, config.seed, config.documents)
        self.training = Sampler(plan.corpus.rows, *cut)
        self.held_out = Sampler(plan.corpus.held_out, *cut)
        self.me, self.first = me, 0
        if plan.resume:
            self.first = resume(plan, me, self.training)
            assert dist.group.WORLD is not None
            checkpoint.set_aside_later(folder, self.first, dist.group.WORLD)
        self.log = Logger(folder, config, self.first, self.leader)
        if not plan.resume and self.leader:
            with self.log.or_say("origin"):
                if origin := config.init or config.config:
                    keep_origin(origin, folder)
            with self.log.or_say("tokenizer"):
                if plan.corpus.tokenizer:
                    plan.corpus.tokenizer.save(folder / "tokenizer")
        saving = me.mesh.groups["saving"]
        self.saver = checkpoint.Saver(folder, saving, config.keep, self.log.say, config.keep_best)
        self.speed, self.watch = Speedometer(plan, me), Watch(me, folder, self.first)
        for message in plan.messages:
            self.log.say(message)
        self.log.say(f"{describe(plan, me)}; writing {folder}")

    def begin(self) -> None:
        """Start the clock and the progress bar."""
        self.before = max((line.get("seconds", 0.0) for line in self.log.lines), default=0.0)  # of a resumed run
        self.start = time.perf_counter()
        steps = range(self.first, self.config.steps)
        shown = {"initial": self.first, "total": self.config.steps, "disable": not self.log.bar}
        self.bar = tqdm(steps, unit="step", dynamic_ncols=True, **shown)

    def seconds(self) -> float:
        """Since the first step, without the time between the end of a run and its resumption."""
        return self.before + time.perf_counter() - self.start

    def next_batches(self) -> list[Batch]:
        """This data rank's micro-batches of the next step."""
        config = self.config
        dp = self.me.mesh.sizes["dp"]
        return self.training.step(config.micro_batch, config.accumulation(dp), self.me.mesh.place["dp"], dp)

    def evaluate(self, step: int) -> tuple[float, bool]:
        """The validation loss, and whether it is the best after any step: the same on all ranks."""
        value = validate(self.me, self.held_out)
        earlier = [line["val_loss"] for line in self.log.lines if "val_loss" in line and line["step"]]
        # Only the leader has the log of a resumed run.
        better = self.leader and value < min(earlier, default=math.inf)
        broken, best = any_rank(self.me, not math.isfinite(value), better).values()
        self.write({"step": step, "val_loss": value})
        if broken and self.config.on_nan == "stop":
            self.saver.finish()
            raise NotFinite(f"step {step}: the validation loss is {value}, though the weights are finite")
        return value, bool(best)

    def save(self, step: int, val_loss: float | None) -> None:
        me = self.me
        corpus = self.plan.corpus
        progress = checkpoint.Progress(
            step,
            self.training.position,
            corpus.size,
            dataclasses.asdict(self.config),
            dataclasses.asdict(self.plan.model),
            me.scaler.value,
            me.scaler.good,
            numbers=corpus.decode is as_numbers,
            data=corpus.fingerprint,
            val_loss=val_loss,
        )
        self.saver.save(share_of_state(me.owners, me.model, me.mesh), progress)

    def arrive(self, launched: Launched) -> None:
        """Wait for the loss and the norm of a step and write them into the log, or end the run."""
        me = self.me
        step = launched.step
        found = launched.found
        if isinstance(found, Reading):
            loss, norm = found.values()
            seconds = found.seconds()
        else:
            loss, norm = found
            seconds = time.perf_counter() - launched.start
        line = {"step": step + 1, "loss": loss, "grad_norm": norm, "lr": launched.lr, "samples": launched.samples}
        finite = math.isfinite(norm)
        try:
            me.scaler.update(finite)
        except FloatingPointError as error:  # no smaller scale would help
            raise self.not_finite(launched, f"the {error}") from None
        line |= {"loss_scale": me.scaler.value} if me.scaler.dynamic else {}
        line |= self.speed.of_step(seconds)
        line |= {"epoch": launched.samples / self.training.windows}
        line |= {"seconds": self.seconds(), "memory": peak_memory(me.device)}
        self.write(line)
        if self.config.meter and step == self.first:
            self.log.say(self.watch.report())
            self.log.keep("meter.json", json.dumps(self.watch.ranks, indent=1) + "\n")
        if not finite and me.scaler.dynamic:
            self.log.say(f"step {step + 1}: a gradient overflows; step left out, loss scale now {me.scaler.value:g}")
        elif not finite and self.config.on_nan == "stop":
            raise self.not_finite(
                launched, f"the weights are those of step {step}; --on-nan skip leaves such steps out"
            )
        elif not finite:
            self.log.say(f"step {step + 1}: {who_is_not_finite(me, launched.batches)} is not finite; step left out")
        self.bar.set_postfix_str(f"loss {loss:.3f}, {self.speed}", refresh=False)

    def not_finite(self, launched: Launched, rest: str) -> NotFinite:
        """The error that ends a run whose gradient is not finite."""
        who = who_is_not_finite(self.me, launched.batches)
        self.saver.finish()  # all ranks are here, and the pending checkpoint is good
        return NotFinite(f"step {launched.step + 1}: {who} is not finite; {rest}")

    def write(self, line: Log) -> None:
        self.log.write(line)
        self.watch.note(line)

    def end(self, early: bool) -> list[Log]:
        """Complete the last checkpoint and print the summary, unless the run was stopped `early`."""
        config = self.config
        log = self.log
        saver = self.saver
        folder = self.folder
        saver.finish()
        wait_for_weights(self.me)
        self.watch.end()
        if not early:
            if config.sample and self.leader and not saver.failure:
                try:
                    log.say(sample(self.plan, folder, log))
                except torch.OutOfMemoryError:  # the full model does not fit beside this rank's part
                    what = "no sample: the full model does not fit on this GPU beside the run"
                    log.say(f"{what}; try generate.py {folder}")
            log.say(self.watch.summary(log.lines))
            log.say(curve.in_terminal(log.lines))
            log.keep("loss.svg", curve.as_svg(log.lines, folder.name))
            validations = [line["val_loss"] for line in log.lines if "val_loss" in line]
            log.say(
                f"validation loss {validations[0]:.3f} -> {validations[-1]:.3f} nats per token"
                f"{in_bits(validations[-1], self.plan)} after {config.steps} steps, "
                f"{self.seconds():.0f} s; checkpoint in {folder}/checkpoints"
            )
        if saver.failure:
            raise RunEnds(f"{saver.failure}, and it is the last; make room: --resume {folder} does its steps again")
        return log.lines


def resume(plan: Plan, me: Trainer, training: Sampler) -> int:
    """Go on where a checkpoint ends. Returns how many steps it has done."""
    assert plan.resume is not None
    config = plan.config
    _, path, progress = plan.resume
    # --- exercise 11.33: weights, optimizer, step, place in the data and loss scale, all as they were left ---
    like = full_shapes(plan.model, config.mixture(plan.model))
    load_full_state(me.owners, me.model, me.mesh, checkpoint.load(path, like, weight_dtype(config)))
    first = progress.step
    training.position = progress.samples
    me.scaler.value = progress.loss_scale
    me.scaler.good = progress.good_steps
    # --- end exercise ---
    return first


def in_bits(loss: float, plan: Plan) -> str:
    rate = plan.corpus.tokens_per_byte
    return f" ({curve.bits_per_byte(loss, rate):.3f} bits per byte)" if rate else ""


def evaluate_alone(plan: Plan) -> str:
    """The validation loss of a checkpoint, or of the model that `--init` names."""
    config = plan.config
    me = make_trainer(config, plan.model, plan.device, start_from=plan.start_from)
    held_out = Sampler(plan.corpus.held_out, config.seq_len, plan.corpus.vocab_size, config.seed, config.documents)
    if plan.resume:
        removed = False
        try:
            resume(plan, me, held_out)
        except FileNotFoundError:
            removed = True
        if any_rank(me, removed).values()[0]:
            raise RunEnds(f"{plan.resume[1]} is not there any more: the run goes on and has removed it; try again")
    value = validate(me, held_out)
    wait_for_weights(me)
    what = f"{plan.resume[1].name} of {plan.resume[0]}" if plan.resume else config.init
    return f"{what}: validation loss {value:.6f} nats per token{in_bits(value, plan)}"


def describe(plan: Plan, me: Trainer) -> str:
    """The model, the layout and the arithmetic of the global batch, in words."""
    config = plan.config
    sizes = me.mesh.sizes
    accumulation = config.accumulation(sizes["dp"])
    layout = f"pp {config.pp} x dp {sizes['dp']} x cp {me.mesh.cp} x tp {config.tp}, ZeRO stage {config.zero}"
    if moe := config.mixture(plan.model):
        layout += f", {moe.experts} experts over ep {config.ep}"
    if config.pp > 1:
        layout += f", schedule {config.schedule}"
    elements = elements_of(plan.model, config)
    trained = sum(size for name, size in elements.items() if is_adapter(name))
    adapted = f" ({trained:,} of them trained, in adapters of rank {config.lora_rank})" if trained else ""
    return (
        f"{sum(elements.values()):,} parameters{adapted}; {layout}, on "
        f"{me.device.type}; global batch {config.global_batch} samples = {config.micro_batch} micro-batch x "
        f"{accumulation} accumulation x {sizes['dp']} dp = {config.global_batch * config.seq_len:,} tokens; "
        f"{plan.corpus.size:,} training tokens"
    )


class Speedometer:
    """Tokens per second of a step on all ranks, and the share of the peak (MFU), where the peak is known."""

    def __init__(self, plan: Plan, me: Trainer) -> None:
        config = plan.config
        self.tokens = config.global_batch * config.seq_len
        moe = config.mixture(plan.model)
        active = dataclasses.replace(plan.model, intermediate=plan.model.intermediate * (moe.top_k if moe else 1))
        flops = step_flops(active, config.global_batch, config.seq_len, config.recompute).model
        self.flops = flops / dist.get_world_size()  # of one rank
        known = me.device.type == "cuda" and not plan.model.lora_rank  # LoRA leaves out most weight gradients
        self.peak = peak_flops(torch.cuda.get_device_name(me.device)) if known else None
        self.last: dict[str, Any] = {}

    def of_step(self, seconds: float) -> dict[str, Any]:
        mfu = self.flops / seconds / self.peak if self.peak else None
        self.last = {"tokens_per_s": round(self.tokens / seconds), "mfu": mfu}
        return self.last

    def __str__(self) -> str:
        mfu = self.last["mfu"]
        return f"{self.last['tokens_per_s']:,} tokens/s, MFU {f'{mfu:.1%}' if mfu is not None else 'n/a'}"


def show_mesh(plan: Plan, world_size: int) -> str:
    return picture(*plan.config.layout(plan.model, world_size))


def sample(plan: Plan, run: Path, log: "Logger") -> str:
    """Continue the first 32 held-out tokens on this rank alone, from the last checkpoint; also in sample.txt."""
    config = plan.config
    corpus = plan.corpus
    model, *_ = load_model(str(run), plan.device)
    prompt = corpus.val[None, : min(32, config.seq_len)].long().to(plan.device)
    generator = torch.Generator().manual_seed(config.seed)
    window = trained_length(config)
    tokens = generate(model, prompt, config.sample, 0.8, generator, window=window)[0].tolist()
    text = corpus.decode(tokens)
    log.keep("sample.txt", text)
    return f"--- a sample: {prompt.shape[1]} tokens of the validation text, continued ---\n{text}\n---"


# --------------------------------------------------------------------------------------------- what is kept


def agree(plan: Plan) -> tuple[Plan, Path]:
    """The plan and the run folder, the same on every rank: the resumed one, --out, or runs/ and the time.

    Each rank verifies a part of the checkpoint's files. If one is damaged, all ranks fall back to the
    checkpoint before. Raises UsageError on all ranks if no checkpoint is intact or ranks see different ones.
    """
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    seen: list[Any] = [None] * ranks  # no rank writes to the folder before all have checked that it is free
    dist.all_gather_object(seen, str(plan.resume[1]) if plan.resume else "")
    if len(set(seen)) > 1:
        other = next(i for i, path in enumerate(seen) if path != seen[0])
        what = [f"rank {i} sees {seen[i] or 'no checkpoint'}" for i in (0, other)]
        raise UsageError(f"--resume: {' and '.join(what)}; runs must be in a folder that all nodes share")
    if plan.config.evaluate and not plan.resume:
        return plan, Path()
    lock = None
    said = list[Any]([None, None])  # the run's folder, or why there is none
    if rank == 0 and not plan.config.evaluate:
        try:
            folder = plan.resume[0] if plan.resume else new_folder(plan.config.out)
            lock = checkpoint.hold(folder)
            if plan.config.out:  # another job may have started here since `prepare`
                check_folder(plan.config.out, plan.config.restart)
            said = [str(folder), None]
        except UsageError as error:
            said = [None, error]
    dist.broadcast_object_list(said, src=0)
    if said[1]:
        raise said[1]
    plan = dataclasses.replace(plan, lock=lock)
    if not plan.resume:
        return plan, Path(said[0])
    run, path, progress = plan.resume
    before = [other for other in checkpoint.complete(run) if checkpoint.step_of(other) < progress.step]
    good: list[Any] = [[path, *reversed(before)], list(plan.messages)]
    dist.broadcast_object_list(good, src=0)
    candidates, messages = good
    for candidate in candidates:
        found: list[Any] = [None] * ranks
        dist.all_gather_object(found, checkpoint.damage(candidate, contents=True, part=slice(rank, None, ranks)))
        broken = next(filter(None, found), "")
        if not broken:
            break
        messages.append(f"{candidate.name} is passed over: {broken}")
    else:
        raise UsageError(f"--resume {run}: no checkpoint is whole: {'; '.join(messages)}; start a new run")
    progress = progress if candidate == path else checkpoint.progress_of(candidate)
    return dataclasses.replace(plan, resume=(run, candidate, progress), messages=messages), run


def new_folder(out: str) -> Path:
    """`--out`, or a folder of runs/ that no other run has made in this second."""
    folder = Path(out)
    time_now = f"runs/{datetime.now():%Y%m%d-%H%M%S}"
    try:
        if out:
            folder.mkdir(parents=True, exist_ok=True)
            return folder
        for name in (time_now, *(f"{time_now}-{n}" for n in range(2, 1000))):
            with contextlib.suppress(FileExistsError):
                folder = Path(name)
                folder.mkdir(parents=True)
                return folder
    except OSError as error:
        raise UsageError(f"{folder} cannot be made ({os.strerror(error.errno or 0)})") from None
    raise UsageError(f"a thousand runs have begun in this second as {time_now}; give this one an --out")


class Logger:
    """log.jsonl and the screen. Every rank keeps the lines in memory; only the leader writes and prints."""

    def __init__(self, run: Path, config: Config, first: int, leader: bool) -> None:
        self.leader, self.run = leader, run
        self.unwritten: set[str] = set()
        self.lines: list[Log] = []
        self.bar = leader and sys.stderr.isatty()  # without a terminal, lines are printed instead
        self.steps = config.steps
        self.told = -math.inf
        self.file: IO[str] | None = None
        if not leader:
            return
        path = run / "log.jsonl"
        if first and path.exists():  # resumed: steps after the checkpoint will be done again
            past = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
            self.lines = [line for line in past if line["step"] <= first]
        self.keep("config.json", json.dumps(dataclasses.asdict(config), indent=1) + "\n")
        with self.or_say("log.jsonl"):
            self.file = path.open("w", buffering=1)
            self.file.writelines(json.dumps(line) + "\n" for line in self.lines)

    def write(self, line: Log) -> None:
        self.lines.append(line)
        if self.file:
            with self.or_say("log.jsonl"):
                self.file.write(json.dumps(line) + "\n")
        if "val_loss" in line:
            self.say(f"step {line['step']}: validation loss {line['val_loss']:.3f}")
        elif not self.bar and (time.monotonic() - self.told > SILENCE or line["step"] == self.steps):
            self.told = time.monotonic()
            step, loss, norm, lr = (line[name] for name in ("step", "loss", "grad_norm", "lr"))
            speed = f"{line['tokens_per_s']:,} tokens/s"
            self.say(f"step {step} of {self.steps}: loss {loss:.3f}, norm {norm:.3g}, lr {lr:.3g}, {speed}")

    def keep(self, name: str, text: str) -> None:
        if self.leader:
            with self.or_say(name):
                (self.run / name).write_text(text)

    @contextlib.contextmanager
    def or_say(self, name: str) -> Iterator[None]:
        """A full disk loses lines of the log, but it does not end the run."""
        try:
            yield
        except OSError as error:
            if name not in self.unwritten:
                self.say(f"{self.run / name} cannot be written ({error.strerror}); the run goes on without")
            self.unwritten.add(name)

    def say(self, text: str) -> None:
        if not self.leader:
            return
        try:
            tqdm.write(text)
            sys.stdout.flush()  # a pipe would be buffered
        except OSError:  # the pipe has lost its reader, or the disk is full; log.jsonl has the numbers
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), sys.stdout.fileno())


def place_in_world() -> tuple[int, int, int]:
    """Rank, local rank and world size, as torchrun puts them into the environment. Raises UsageError."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    found = {}
    for name, default in (alone | {"MASTER_PORT": "0"}).items():
        value = os.environ.get(name, default)
        if not value.isdecimal() or int(value) < int(default):
            raise UsageError(f"{name}={value} in the environment must be a whole number from {default}; unset it")
        found[name] = int(value)
    if "RANK" in os.environ:
        for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            if name not in os.environ:
                raise UsageError(f"RANK is in the environment, but no {name}; unset it, or start with torchrun")
    elif found["WORLD_SIZE"] > 1:
        what = f"WORLD_SIZE={found['WORLD_SIZE']} is in the environment, but no RANK"
        raise UsageError(f"{what}; unset it, or start with torchrun")
    if found["RANK"] >= found["WORLD_SIZE"]:
        raise UsageError(f"RANK={found['RANK']} in the environment is not below WORLD_SIZE={found['WORLD_SIZE']}")
    return found["RANK"], found["LOCAL_RANK"], found["WORLD_SIZE"]


def main() -> int:
    rank, local_rank = 0, 0
    try:
        rank, local_rank, world_size = place_in_world()
        plan = prepare(sys.argv[1:], world_size, local_rank)
        if plan.config.show_mesh:
            if rank == 0:
                print(show_mesh(plan, world_size))
            return 0
    except UsageError as error:
        if local_rank == 0:  # all ranks of a node have the same message
            print(f"train.py: {error}", file=sys.stderr)
        return 0 if isinstance(error, NothingLeft) else 2
    except KeyboardInterrupt:
        return 130
    # torchrun passes Ctrl-C on as SIGTERM, and Slurm sends it before the time is up; and Python's own handler is not
    # there in a job that a shell put in the background. A validation has no step to end, and nothing to save.
    stop = Stop()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL if plan.config.evaluate else stop)
    try:
        connect(plan.device, plan.config.timeout)
    except dist.DistError as error:
        where = ":".join(os.environ[f"MASTER_{part}"] for part in ("ADDR", "PORT"))
        why = str(error).splitlines()[0]
        print(f"train.py: rank {rank} cannot meet the others at {where} ({why})", file=sys.stderr)
        return 4
    if plan.config.zero_offload and plan.device.type == "cuda":  # torchrun gives it one core
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    try:
        plan, run = agree(plan)
    except UsageError as error:  # shows only once all are connected, on every rank
        if rank == 0:
            print(f"train.py: {error}", file=sys.stderr)
        return 2
    code = run_to_its_end(plan, run, stop)
    gc.collect()  # a remaining reference to the group would keep its threads alive after the next line
    dist.destroy_process_group()
    return code


def run_to_its_end(plan: Plan, run: Path, stop: Stop) -> int:
    """Train and return the exit code. One rank prints in one line what ended a run early."""
    rank = dist.get_rank()
    try:
        if plan.config.evaluate:
            said = evaluate_alone(plan)
            if rank == 0:
                print("\n".join([*plan.messages, said]))
            return 0
        left = plan.config.steps - train(plan, run, stop)[-1]["step"]
    except RunEnds as error:
        if rank == 0:
            print(f"train.py: {error}", file=sys.stderr)
        return 3
    except (FloatingPointError, BadToken) as error:  # of fp8 on a CPU, or of data: each rank looks at its own
        print(f"train.py: rank {rank}: {error}", file=sys.stderr, flush=True)
        return 3
    except RuntimeError as error:
        words = re.search("time.?out|timed out|connection|broken pipe", str(error), re.IGNORECASE)
        if not (words or isinstance(error, dist.DistError)):
            raise
        waited_for_another_rank(error)
        sys.stdout.flush()
        os._exit(4)  # no orderly exit: other ranks may be in a collective
    if left and rank == 0:
        print(f"\nstopped; go on with --resume {run}", file=sys.stderr)
    return 130 if left else 0


def waited_for_another_rank(error: RuntimeError) -> None:
    """Print, on one of the ranks that timed out, which ranks did not: these are stuck or dead.

    Every rank that waits for them reaches its timeout and notes that in the store of the process group. One that
    waits for this rank only may note it too late, and is named with them.
    """
    here = Path(__file__).parent
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).parent == here]
    where = f"{frames[-1].name} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else "a collective"
    reason = str(error).strip().splitlines()[0]
    rank = dist.get_rank()
    ranks = range(dist.get_world_size())
    noted = threading.Event()
    answers = list[list[int]]()

    def ask() -> None:
        with contextlib.suppress(Exception):  # the process with the store has ended
            store = dist.distributed_c10d._get_default_store()
            store.set_timeout(timedelta(seconds=GRACE))
            store.set(f"waited {rank}", "")
            noted.set()
            time.sleep(GRACE)  # the other ranks time out about now
            answers.append([other for other in ranks if other == rank or store.check([f"waited {other}"])])

    # A request to a store whose process is stuck has no timeout, so a thread makes it. If that process has
    # ended, torch writes a C++ stack to stderr on every rank.
    asking = threading.Thread(target=ask, daemon=True)
    stderr = os.dup(2)
    sys.stderr.flush()
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    asking.start()
    asking.join(3 * GRACE)
    os.dup2(stderr, 2)
    if answers:
        speaks = rank == min(answers[0])
        others = ", ".join(str(other) for other in ranks if other not in answers[0])
    else:  # rank 0, which has the store, is stuck; or it has ended, and may have printed this
        first = rank == 1 or os.environ.get("LOCAL_RANK") == "0"  # one on each node
        speaks = not noted.is_set() or (asking.is_alive() and first)
        others = "0, and perhaps more"
    if speaks:
        what = f"ranks that do not answer, stuck or dead: {others}" if others else "one another: all have given up"
        print(f"train.py: rank {rank} has waited in {where} for {what} ({reason})", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
