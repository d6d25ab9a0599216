"""The trainer: a Llama on real data on many ranks, every technique imported from the chapter that teaches it.

    options.py     every option, and what fits        paths.py       finds the chapters' folders
    mesh.py        the grid of ranks and its groups   model.py       a rank's part of the model: chapters 01, 04, 05
    step.py        one rank and one step              engine.py      gradients to new weights: chapters 02 and 03
    data.py        tokens to micro-batches            full_state.py  the same as whole tensors, to save and to load
    sources.py     what is on disk                    prepare.py     your own data to tokens
    checkpoint.py  save, find, load                   curve.py       the loss curve

    python 11_5d_trainer/train.py                                       one rank
    torchrun --nproc_per_node 4 11_5d_trainer/train.py                  4 data-parallel ranks: nccl on GPUs, else gloo
    torchrun --nproc_per_node 8 11_5d_trainer/train.py --tp 2 --sequence-parallel --cp 2 --cp-kind zigzag --zero 2
    torchrun --nproc_per_node 4 11_5d_trainer/train.py --data my.txt --steps 2000 --seq-len 256 --out runs/mine
    torchrun --nproc_per_node 8 11_5d_trainer/train.py --pp 2 --schedule zb-h1 --tp 2 --zero 1
    torchrun --nproc_per_node 2 11_5d_trainer/train.py --resume runs/mine --steps 3000

It writes into the run's folder: config.json, log.jsonl (one line per step and per validation), checkpoints/ and, at
the end, sample.txt and loss.svg. Its last line is the summary: validation loss from first to last, steps, seconds.
"""

import dataclasses
import gc
import json
import math
import os
import signal
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import checkpoint
import curve
import paths  # noqa: F401  finds the chapters below
import torch
import torch.distributed as dist
import torch.distributed.nn  # first imported while a group is up, it would keep that group until the end
from accounting import peak_flops, step_flops
from checks import check_compile, check_kernels, check_memory
from data import Corpus, Sampler, load_corpus
from full_state import load_full_state, share_of_state
from generate import load_model
from hf import check_weights, keep_origin, read_sizes
from llama import LlamaConfig
from mesh import picture
from metrics import Watch, board
from model import EXPERTS, PRESETS, full_shapes
from options import SIZES, Config, NothingLeft, UsageError, check_folder, flag, fresh, merge, parse, settle
from sources import as_numbers
from step import (
    Batch,
    NotFinite,
    Rank,
    Reading,
    has_bf16,
    launch_step,
    make_rank,
    reads_late,
    sent_to,
    train_step,
    validate,
    weight_dtype,
    who_is_not_finite,
)
from torch.distributed.rendezvous import rendezvous
from tqdm import tqdm
from training_step import generate

Log = dict[str, Any]


# ----------------------------------------------------------------------------------- before any process group


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run needs to know, checked, before ranks are connected."""

    config: Config
    corpus: Corpus
    model: LlamaConfig
    device: torch.device
    resume: tuple[Path, Path, checkpoint.Progress] | None
    messages: list[str]  # for the user


def prepare(arguments: list[str], world_size: int, local_rank: int = 0) -> Plan:
    """Options, data and checkpoint, each checked. Raises UsageError with one line for the user."""
    given = parse(arguments)
    resume = None
    messages: list[str] = []
    if given.get("restart"):
        if not given.get("out"):
            raise UsageError("--restart goes on with the run in --out, which is missing; add --out FOLDER")
        if given.get("resume"):
            raise UsageError(f"--restart goes on with --out, not with --resume {given['resume']}; leave one out")
        if checkpoint.complete(Path(given["out"])):
            given["resume"] = given.pop("out")
    if given.get("resume"):
        run, path, progress, messages = checkpoint.find(given["resume"])
        resume = run, path, progress
    config = merge(resume[2].config, given, str(resume[1])) if resume else fresh(given)
    config.check()
    if resume and resume[2].step >= config.steps:
        if given.get("restart"):
            raise NothingLeft(f"--restart: {resume[1]} has done all {config.steps} steps; nothing is left to do")
        raise UsageError(f"--steps {config.steps}: {resume[1]} has done {resume[2].step} already; ask for more")
    device = find_device(config.device, local_rank)
    if config.tensorboard:
        board(None)
    corpus = load_corpus(config)
    messages = [*messages, *corpus.messages]
    if resume and resume[2].tokens != corpus.size:
        raise UsageError(
            f"--resume {config.resume}: it was trained on {resume[2].tokens:,} tokens, but --data "
            f"{config.data or '(the standard library)'} now has {corpus.size:,}; restore it, or start a new run"
        )
    if resume and resume[2].data not in ("", corpus.fingerprint):
        raise UsageError(
            f"--resume {config.resume}: --data {config.data} has other contents or weights than it had then"
        )
    if resume:
        sizes = LlamaConfig(**resume[2].sizes)
    else:
        config, sizes = choose_sizes(config, given, corpus.vocab_size)
        config.check_experts(sizes, config.dp(world_size) * config.cp)  # who are counted next
        count = sum(tensor.numel() for tensor in full_shapes(sizes, config.mixture(sizes)).values())
        bf16 = has_bf16() if device.type == "cuda" else None
        config, said = settle(config, given, count, world_size, bf16)
        config.check()
        messages += said
    config.check_heard(given, sizes)
    config.check_layout(sizes, world_size)
    if not config.show_mesh:
        check_memory(config, sizes, world_size, device)
    if config.out:
        check_folder(config.out, config.restart)
    check_kernels(config, sizes, device)
    check_compile(config, sizes, world_size, device)
    if config.kernels == "triton" and device.type == "cpu":
        messages.append("--kernels triton runs in Triton's interpreter on a CPU: right, and thousands of times slower")
    return Plan(config, corpus, sizes, device, resume, messages)


def choose_sizes(config: Config, given: dict[str, Any], vocab_size: int) -> tuple[Config, LlamaConfig]:
    """The sizes of a new model, from a preset or a Hugging Face config.json, and from single options on top.

    What such a file says of experts becomes part of the options. Raises UsageError where an option contradicts it.
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
    return config, sizes


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
    here = int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1))  # not by the own rank: all have to end with a line
    if gpus and here > gpus:
        what = f"--nproc_per_node {here} is more than the {gpus} GPU(s) of this machine"
        raise UsageError(f"{what}; start {gpus}, one for each, or use --device cpu")
    return torch.device("cuda", local_rank) if gpus else torch.device("cpu")


def connect(device: torch.device, timeout: float) -> None:
    """Join the world that torchrun describes, or be one alone. Every collective fails after `timeout` seconds."""
    limit = timedelta(seconds=timeout)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = False  # by default it is; some images' environment says otherwise
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        store, rank, size = next(rendezvous("env://", timeout=limit))
        store.set_timeout(limit)
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # torchrun's store outlives a restart, and the addresses of ranks that have died are still in it. On several
            # nodes, each counts its restarts for itself: there only launch.py helps, which has a new store each time.
            store = dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        own: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit, **own)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=limit)


# -------------------------------------------------------------------------------------------------- training


def learning_rate(step: int, config: Config) -> float:
    """Linear warm-up to `lr`, then half a cosine down to `min_lr` at the last step."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    done = (step - config.warmup) / max(1, config.steps - 1 - config.warmup)
    return config.min_lr + 0.5 * (config.lr - config.min_lr) * (1 + math.cos(math.pi * min(done, 1.0)))


class Stop:
    """Whether someone asked the run to end. The first signal waits for the end of the step, the second does not."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, number: int, frame: Any) -> None:
        if self.asked and number == signal.SIGINT:
            os._exit(130)  # other ranks may be in the middle of a collective: do not wait for them
        self.asked = True


def any_rank(me: Rank, *flags: bool) -> Reading:
    """Each flag, if it is up on any rank: a decision that all take alike. Signals, for one, do not arrive everywhere in
    the same step."""
    votes = sent_to(me.device, torch.tensor([int(flag) for flag in flags]))
    dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=me.mesh.groups["world"])
    return Reading(votes)


@dataclasses.dataclass
class Launched:
    """A step that has been launched, and what its line in the log needs beside its loss and its norm."""

    step: int
    lr: float
    samples: int  # that have been used after it
    batches: list[Batch]
    start: float
    found: Any  # loss and norm: a Reading, or the two numbers


def train(plan: Plan, run: Path, stop: Stop | None = None) -> list[Log]:
    """Train as planned on all ranks of the world, writing into the folder `run`. Returns the log's lines."""
    config, world = plan.config, dist.group.WORLD
    assert world is not None
    stop = stop or Stop()
    me = make_rank(config, plan.model, plan.device, start_from="" if plan.resume else config.init)
    dp, leader = me.mesh.sizes["dp"], dist.get_rank() == 0
    accumulation = config.accumulation(dp)
    cut = (config.seq_len, plan.corpus.vocab_size, config.seed, config.documents)
    training, held_out = Sampler(plan.corpus.rows, *cut), Sampler(plan.corpus.held_out, *cut)

    first = 0
    if plan.resume:
        _, path, progress = plan.resume
        # --- exercise 11.33: weights, optimizer, step, place in the data and loss scale, all as they were left ---
        like = full_shapes(plan.model, config.mixture(plan.model))
        load_full_state(me.engine, me.model, me.mesh, checkpoint.load(path, like, weight_dtype(config)))
        first, training.position = progress.step, progress.samples
        me.scaler.value, me.scaler.good = progress.loss_scale, progress.good_steps
        # --- end exercise ---
        checkpoint.set_aside_later(run, first, world)
    elif leader:
        if origin := config.init or config.config:
            keep_origin(origin, run)
        if plan.corpus.tokenizer:
            plan.corpus.tokenizer.save(run / "tokenizer")
    log = Logger(run, config, first, leader)
    saver = checkpoint.Saver(run, me.mesh.groups["saving"], config.keep)
    speed, watch = Speedometer(plan, me), Watch(me, run, first)
    for message in plan.messages:
        log.say(message)
    log.say(f"{describe(plan, me)}; writing {run}")

    def evaluate(step: int) -> None:
        line = {"step": step, "val_loss": validate(me, held_out)}
        log.write(line)
        watch.note(line)

    def save(step: int) -> None:
        options, sizes = dataclasses.asdict(config), dataclasses.asdict(plan.model)
        position, scale = training.position, (me.scaler.value, me.scaler.good)
        numbers = plan.corpus.decode is as_numbers
        size, data = plan.corpus.size, plan.corpus.fingerprint
        progress = checkpoint.Progress(step, position, size, options, sizes, *scale, numbers, data)
        saver.save(share_of_state(me.engine, me.model, me.mesh), progress)

    def arrive(launched: Launched) -> None:
        """Loss and norm of a step are here, or are waited for: into the log with them, or the end of the run."""
        step, found = launched.step, launched.found
        if isinstance(found, Reading):
            (loss, norm), seconds = found.values(), found.seconds()
        else:
            (loss, norm), seconds = found, time.perf_counter() - launched.start
        line = {"step": step + 1, "loss": loss, "grad_norm": norm, "lr": launched.lr, "samples": launched.samples}
        try:
            me.scaler.update(math.isfinite(norm))
        except FloatingPointError as error:  # no smaller scale would help
            saver.finish()
            where = f"step {step + 1}: {who_is_not_finite(me, launched.batches)} is not finite"
            raise NotFinite(f"{where}; the {error}") from None
        line |= {"loss_scale": me.scaler.value} if me.scaler.dynamic else {}
        line |= speed.of_step(seconds)
        log.write(line)
        watch.note(line)
        if config.meter and step == first:
            log.say(watch.report())
        if not math.isfinite(norm) and me.scaler.dynamic:
            log.say(f"step {step + 1}: a gradient overflows; step left out, loss scale now {me.scaler.value:g}")
        elif not math.isfinite(norm):
            where = f"step {step + 1}: {who_is_not_finite(me, launched.batches)} is not finite"
            if config.on_nan == "stop":
                saver.finish()  # all ranks are here, and what is being written is good
                raise NotFinite(f"{where}; the weights are those of step {step}; --on-nan skip leaves such steps out")
            log.say(f"{where}; step left out")
        bar.set_postfix_str(f"loss {loss:.3f}, {speed}", refresh=False)

    if first == 0:
        evaluate(0)
    begin = time.perf_counter()
    late = reads_late(me)  # then a step is under way before the host reads what the last one found
    under_way: Launched | None = None
    asked: Reading | None = None  # the vote of the step before
    bar = tqdm(range(first, config.steps), initial=first, total=config.steps, disable=not leader, **log.bar_options)
    for step in bar:
        start, lr = time.perf_counter(), learning_rate(step, config)
        for parameters in me.engine.param_groups:
            parameters["lr"] = lr
        batches = training.step(config.micro_batch, accumulation, me.mesh.place["dp"], dp)
        with watch.step(step):
            found: Any  # two numbers, or a Reading of them
            if late:
                found = launch_step(me, batches, since=under_way.found.done if under_way else None)
            else:
                found = train_step(me, batches)
        if under_way:
            arrive(under_way)
        under_way = launched = Launched(step, lr, training.position, batches, start, found)
        end = step + 1 == config.steps
        vote = any_rank(me, stop.asked, saver.busy())
        stopped, writing = (asked if late and asked is not None else vote).values()
        asked = vote
        evaluating = end or (config.eval_every and (step + 1) % config.eval_every == 0)
        saving = end or stopped or (config.save_every and (step + 1) % config.save_every == 0)
        if not late or step == first or evaluating or saving:  # what comes now is about the weights after this step
            arrive(launched)
            under_way = None
        if not writing:
            saver.finish()  # the checkpoint gets its name
        if evaluating:
            evaluate(step + 1)
        if saving:
            save(step + 1)
            asked = None  # an old vote knows nothing of the files that are being written now
        if stopped:
            break
    saver.finish()
    me.engine.arrive()
    watch.end()
    if stopped and not end:
        return log.lines
    if config.sample and leader:
        log.say(sample(plan, run))
    log.say(watch.summary(log.lines))
    log.say(curve.in_terminal(log.lines))
    if leader:
        (run / "loss.svg").write_text(curve.as_svg(log.lines, run.name))
    validations = [line["val_loss"] for line in log.lines if "val_loss" in line]
    rate = plan.corpus.tokens_per_byte
    in_bits = f" ({curve.bits_per_byte(validations[-1], rate):.3f} bits per byte)" if rate else ""
    log.say(
        f"validation loss {validations[0]:.3f} -> {validations[-1]:.3f} nats per token{in_bits} after {config.steps} "
        f"steps, {time.perf_counter() - begin:.0f} s; checkpoint in {run}/checkpoints"
    )
    return log.lines


def describe(plan: Plan, me: Rank) -> str:
    """The model, the layout and the arithmetic of the global batch, in words."""
    config, sizes = plan.config, me.mesh.sizes
    accumulation = config.accumulation(sizes["dp"])
    layout = f"pp {config.pp} x dp {sizes['dp']} x cp {me.mesh.cp} x tp {config.tp}, ZeRO stage {config.zero}"
    if moe := config.mixture(plan.model):
        layout += f", {moe.experts} experts over ep {config.ep}"
    if config.pp > 1:
        layout += f", schedule {config.schedule}"
    return (
        f"{sum(t.numel() for t in full_shapes(plan.model, moe).values()):,} parameters; {layout}, on "
        f"{me.device.type}; global batch {config.global_batch} samples = {config.micro_batch} micro-batch x "
        f"{accumulation} accumulation x {sizes['dp']} dp = {config.global_batch * config.seq_len:,} tokens; "
        f"{plan.corpus.size:,} training tokens"
    )


class Speedometer:
    """Tokens per second of the whole run, and the share of the device's peak (MFU), where the peak is known."""

    def __init__(self, plan: Plan, me: Rank) -> None:
        config = plan.config
        self.tokens = config.global_batch * config.seq_len
        moe = config.mixture(plan.model)
        active = dataclasses.replace(plan.model, intermediate=plan.model.intermediate * (moe.top_k if moe else 1))
        flops = step_flops(active, config.global_batch, config.seq_len, config.recompute).model
        self.flops = flops / dist.get_world_size()  # of one rank
        self.peak = peak_flops(torch.cuda.get_device_name(me.device)) if me.device.type == "cuda" else None
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


def sample(plan: Plan, run: Path) -> str:
    """Continue the first 32 held-out tokens on this rank alone, from the last checkpoint; also in sample.txt."""
    config, corpus = plan.config, plan.corpus
    model, *_ = load_model(str(run), plan.device)
    prompt = corpus.val[None, : min(32, config.seq_len)].long().to(plan.device)
    generator = torch.Generator().manual_seed(config.seed)
    tokens = generate(model, prompt, config.sample, 0.8, generator)[0].tolist()
    text = corpus.decode(tokens)
    (run / "sample.txt").write_text(text)
    return f"--- a sample: 32 tokens of the validation text, continued ---\n{text}\n---"


# --------------------------------------------------------------------------------------------- what is kept


def agree(plan: Plan) -> tuple[Plan, Path]:
    """The plan and the run folder, the same on every rank: the resumed one, the one asked for, or runs/ and the time.

    They also read the contents of the checkpoint, each a part of its files; if they are damaged, all go back to the one
    before. Raises UsageError, on all ranks alike, if none is whole or the ranks do not see the same one.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    seen: list[Any] = [None] * ranks  # nobody writes to the folder before the last rank has looked whether it is free
    dist.all_gather_object(seen, str(plan.resume[1]) if plan.resume else "")
    if len(set(seen)) > 1:
        other = next(i for i, path in enumerate(seen) if path != seen[0])
        what = [f"rank {i} sees {seen[i] or 'no checkpoint'}" for i in (0, other)]
        raise UsageError(f"--resume: {' and '.join(what)}; runs must be in a folder that all nodes share")
    if not plan.resume:
        name = [plan.config.out or f"runs/{datetime.now():%Y%m%d-%H%M%S}"]
        dist.broadcast_object_list(name, src=0)
        Path(name[0]).mkdir(parents=True, exist_ok=True)
        return plan, Path(name[0])
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


class Logger:
    """log.jsonl and the screen. Every rank keeps its lines in memory; the leader alone writes and speaks."""

    def __init__(self, run: Path, config: Config, first: int, leader: bool) -> None:
        self.leader = leader
        self.lines: list[Log] = []
        self.bar_options: dict[str, Any] = {"unit": "step", "dynamic_ncols": True}
        if not sys.stderr.isatty():
            self.bar_options["mininterval"] = 10.0  # a log file is not a screen
        if not leader:
            return
        path = run / "log.jsonl"
        if first and path.exists():  # resumed: what came after the checkpoint is about to happen again
            past = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
            self.lines = [line for line in past if line["step"] <= first]
        (run / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=1) + "\n")
        self.file = path.open("w", buffering=1)
        self.file.writelines(json.dumps(line) + "\n" for line in self.lines)

    def write(self, line: Log) -> None:
        self.lines.append(line)
        if self.leader:
            self.file.write(json.dumps(line) + "\n")
            if "val_loss" in line:
                self.say(f"step {line['step']}: validation loss {line['val_loss']:.3f}")

    def say(self, text: str) -> None:
        if self.leader:
            tqdm.write(text)


def main() -> int:
    rank, local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    try:
        plan = prepare(sys.argv[1:], world_size, local_rank)
        if plan.config.show_mesh:
            if rank == 0:
                print(show_mesh(plan, world_size))
            return 0
    except UsageError as error:
        if local_rank == 0:  # all ranks of a node say the same
            print(f"train.py: {error}", file=sys.stderr)
        return 0 if isinstance(error, NothingLeft) else 2
    stop = Stop()
    signal.signal(
        signal.SIGTERM, stop
    )  # torchrun passes Ctrl-C on as SIGTERM, and Slurm sends it before the time is up
    signal.signal(signal.SIGINT, stop)  # Python's own is not there in a job that a shell put in the background
    connect(plan.device, plan.config.timeout)
    if plan.config.zero_offload and plan.device.type == "cuda":  # the host updates: not with torchrun's one core
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    try:
        plan, run = agree(plan)
    except UsageError as error:  # what only shows when all are there, and all have seen
        if rank == 0:
            print(f"train.py: {error}", file=sys.stderr)
        return 2
    left = plan.config.steps - train(plan, run, stop)[-1]["step"]
    if left and rank == 0:
        print(f"\nstopped; go on with --resume {run}", file=sys.stderr)
    gc.collect()  # whatever still points into the group would keep its threads alive beyond the next line
    dist.destroy_process_group()
    return 130 if left else 0


if __name__ == "__main__":
    sys.exit(main())
