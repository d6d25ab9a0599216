"""The trainer: a Llama on real data on many ranks, every technique imported from the chapter that teaches it.

    options.py     every option, and what fits        chapters.py    finds the chapters' folders
    mesh.py        the grid of ranks and its groups   model.py       a rank's model: chapters 01, 04 and 05
    data.py        tokens to micro-batches            engine.py      gradients to new weights: chapters 02 and 03
    checkpoint.py  save, find, load

One step of one rank:

    micro-batches of this rank, this rank's part of each sequence
      -> valid tokens of the global batch (one number, all-reduced)
      for each: loss = sum over its tokens / that number; backward      nothing is sent, except in the last one,
                                                                        where buckets leave while backward runs
    every gradient is now the sum over all data and context ranks
    norm of the whole gradient, clip, AdamW

    python 11_5d_trainer/train.py                                       one rank
    torchrun --nproc_per_node 4 11_5d_trainer/train.py                  4 data-parallel ranks: nccl on GPUs, else gloo
    torchrun --nproc_per_node 8 11_5d_trainer/train.py --tp 2 --sequence-parallel --cp 2 --cp-kind zigzag --zero 2
    torchrun --nproc_per_node 4 11_5d_trainer/train.py --data my.txt --steps 2000 --seq-len 256 --out runs/mine
    torchrun --nproc_per_node 2 11_5d_trainer/train.py --resume runs/mine --steps 3000

It writes into the run's folder: config.json, log.jsonl (one line per step and per validation), checkpoints/ and, at
the end, sample.txt. Its last line is the summary: validation loss from first to last, steps, seconds.
"""

import dataclasses
import gc
import json
import math
import os
import signal
import sys
import time
from contextlib import nullcontext
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import chapters  # noqa: F401  finds the chapters below
import checkpoint
import torch
import torch.distributed as dist
from accounting import peak_flops, step_flops
from data import Corpus, Sampler, load_corpus
from data_parallel import global_valid_tokens
from engine import clip_gradients, full_state, load_full_state, make_engine
from llama import IGNORE, Llama, LlamaConfig
from mesh import Mesh, make_mesh
from model import PRESETS, build, full_shapes, loss_sum, my_positions
from options import Config, UsageError, check_folder, merge, parse
from single_gpu import adamw, generate
from torch import Tensor
from tqdm import tqdm

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


def prepare(arguments: list[str], world_size: int, local_rank: int = 0) -> Plan:
    """Options, data and checkpoint, each checked. Raises UsageError with one line for the user."""
    given = parse(arguments)
    resume = checkpoint.find(given["resume"]) if given.get("resume") else None
    config = merge(resume[2].config, given, str(resume[1])) if resume else Config(**given)
    config.check()
    if resume and resume[2].step >= config.steps:
        raise UsageError(f"--steps {config.steps}: {resume[1]} has done {resume[2].step} already; ask for more")
    device = find_device(config.device, local_rank)
    corpus = load_corpus(config)
    if resume and resume[2].tokens != len(corpus.train):
        raise UsageError(
            f"--resume {config.resume}: it was trained on {resume[2].tokens:,} tokens, but --data "
            f"{config.data or '(the standard library)'} now has {len(corpus.train):,}; restore it, or start a new run"
        )
    sizes = dataclasses.replace(PRESETS[config.preset], vocab_size=corpus.vocab_size)
    if config.tied:
        sizes = dataclasses.replace(sizes, tied=True)
    config.check_layout(sizes, world_size)
    if config.out:
        check_folder(config.out)
    return Plan(config, corpus, sizes, device, resume)


def find_device(asked: str, local_rank: int) -> torch.device:
    gpus = torch.cuda.device_count() if asked != "cpu" else 0
    if asked == "cuda" and not gpus:
        raise UsageError("--device cuda: there is no GPU here; use --device cpu")
    if gpus and local_rank >= gpus:
        raise UsageError(f"--nproc_per_node is more than the {gpus} GPU(s) of this machine; start {gpus}, one for each")
    return torch.device("cuda", local_rank) if gpus else torch.device("cpu")


def connect(device: torch.device, timeout: float) -> None:
    """Join the world that torchrun describes, or be one alone. Every collective fails after `timeout` seconds."""
    limit = timedelta(seconds=timeout)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=limit, device_id=device if device.type == "cuda" else None)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=limit)


# -------------------------------------------------------------------------------------------------- training


def learning_rate(step: int, config: Config) -> float:
    """Linear warm-up to `lr`, then half a cosine down to `min_lr` at the last step."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    done = (step - config.warmup) / max(1, config.steps - 1 - config.warmup)
    return config.min_lr + 0.5 * (config.lr - config.min_lr) * (1 + math.cos(math.pi * min(done, 1.0)))


@dataclasses.dataclass
class Rank:
    """What one rank works with."""

    config: Config
    mesh: Mesh
    model: Any
    engine: Any
    positions: Tensor  # of its tokens in the sequence, [S / cp]
    device: torch.device

    def mine(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Tokens and labels [B, S] to this rank's part of the sequence [B, S / cp], on its device."""
        tokens, labels = (x.to(self.device)[:, self.positions] for x in batch)
        return tokens, labels

    def loss_sum(self, tokens: Tensor, labels: Tensor) -> Tensor:
        bf16 = self.config.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16) if bf16 else nullcontext():
            return loss_sum(self.model, tokens, labels, self.positions)


def make_rank(plan: Plan, optimizer: Any = adamw) -> Rank:
    """Lay out the ranks, build this one's model. `optimizer(model, lr)` makes the optimizer that ZeRO may take over."""
    config, device = plan.config, plan.device
    ring, all_to_all = config.ring_and_ulysses(plan.model)
    mesh = make_mesh(config.dp(dist.get_world_size()), ring, all_to_all, config.tp, config.timeout)
    model = build(
        plan.model,
        mesh,
        cp_kind=config.cp_kind,
        sequence_parallel=config.sequence_parallel,
        recompute=config.recompute,
        seed=config.seed,
        dtype=weight_dtype(config),
        device=device,
    )
    built = optimizer(model, config.lr)
    for group in built.param_groups:
        if group["weight_decay"]:
            group["weight_decay"] = config.weight_decay
    engine = make_engine(config.zero, model, built, mesh.groups["data"], int(config.bucket_mib * 2**20))
    positions = my_positions(config.seq_len, mesh, config.cp_kind).to(device)
    return Rank(config, mesh, model, engine, positions, device)


def weight_dtype(config: Config) -> torch.dtype:
    return torch.float64 if config.precision == "fp64" else torch.float32  # bf16 is autocast's: weights stay fp32


@torch.no_grad()
def validate(me: Rank, sampler: Sampler) -> float:
    """Loss per token over the first `eval_samples` held-out samples, which the data-parallel ranks share out."""
    total = torch.zeros(2, dtype=torch.float64, device=me.device)  # sum of losses, number of tokens
    dp = me.mesh.sizes["dp"]
    for batch in sampler.held_out(me.config.eval_samples, me.config.micro_batch, me.mesh.place["dp"], dp):
        tokens, labels = me.mine(batch)
        loss = me.loss_sum(tokens, labels)
        total += torch.stack([loss.double(), (labels != IGNORE).sum().double()])
    dist.all_reduce(total, group=me.mesh.groups["data"])
    return (total[0] / total[1]).item()


def train_step(me: Rank, batches: list[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """One step on the global batch. Returns its loss per token and the norm of its gradient, before clipping."""
    batches = [me.mine(batch) for batch in batches]
    data = me.mesh.groups["data"]
    valid = global_valid_tokens(torch.cat([labels.flatten() for _, labels in batches]), data)
    total = torch.zeros((), dtype=torch.float64, device=me.device)
    me.engine.zero_grad()
    for i, (tokens, labels) in enumerate(batches):
        with me.engine.micro_batch(last=i == len(batches) - 1):
            loss = me.loss_sum(tokens, labels) / valid
            loss.backward()
        total += loss.detach()
    dist.all_reduce(total, group=data)  # to show it: each rank knows the loss of its own tokens
    norm = clip_gradients(me.engine, me.model, me.mesh, me.config.clip)
    me.engine.step()
    return total.item(), norm


def train(plan: Plan, run: Path) -> list[Log]:
    """Train as planned on all ranks of the world, writing into the folder `run`. Returns the log's lines."""
    config, world = plan.config, dist.group.WORLD
    assert world is not None
    me = make_rank(plan)
    dp, leader = me.mesh.sizes["dp"], dist.get_rank() == 0
    accumulation = config.accumulation(dp)
    training = Sampler(plan.corpus.train, config.seq_len, plan.corpus.vocab_size, config.seed)
    held_out = Sampler(plan.corpus.val, config.seq_len, plan.corpus.vocab_size, config.seed)

    first = 0
    if plan.resume:
        _, path, progress = plan.resume
        state = checkpoint.load(path, full_shapes(plan.model), weight_dtype(config), world)
        load_full_state(me.engine, me.model, me.mesh, state)
        first, training.position = progress.step, progress.samples
        checkpoint.set_aside_later(run, first, world)
    log = Logger(run, config, first, leader)
    tokens_per_step = config.global_batch * config.seq_len
    samples = config.micro_batch * accumulation  # of one data-parallel rank, which tp x cp ranks compute together
    flops = step_flops(plan.model, samples, config.seq_len, config.recompute).model / (config.tp * me.mesh.cp)
    peak = peak_flops(torch.cuda.get_device_name(me.device)) if me.device.type == "cuda" else None
    layout = f"dp {dp} x cp {me.mesh.cp} x tp {config.tp}, ZeRO stage {config.zero}, on {me.device.type}"
    log.say(
        f"{sum(shape.numel() for shape in full_shapes(plan.model).values()):,} parameters; {layout}; "
        f"global batch {config.global_batch} samples = {config.micro_batch} micro-batch x {accumulation} accumulation "
        f"x {dp} dp = {tokens_per_step:,} tokens; {len(plan.corpus.train):,} training tokens; writing {run}"
    )

    def evaluate(step: int) -> None:
        log.write({"step": step, "val_loss": validate(me, held_out)})

    if first == 0:
        evaluate(0)
    begin = time.perf_counter()
    bar = tqdm(range(first, config.steps), initial=first, total=config.steps, disable=not leader, **log.bar_options)
    for step in bar:
        start = time.perf_counter()
        for parameters in me.engine.param_groups:
            parameters["lr"] = learning_rate(step, config)
        batches = training.step(config.micro_batch, accumulation, me.mesh.place["dp"], dp)
        loss, norm = train_step(me, batches)
        seconds = time.perf_counter() - start
        mfu = flops / seconds / peak if peak else None
        speed = tokens_per_step / seconds
        log.write(
            {"step": step + 1, "loss": loss, "grad_norm": norm, "lr": learning_rate(step, config)}
            | {"samples": training.position, "tokens_per_s": round(speed), "mfu": mfu}
        )
        shown = f"{mfu:.1%}" if mfu is not None else "n/a"
        bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tokens/s, MFU {shown}", refresh=False)
        end = step + 1 == config.steps
        if end or (config.eval_every and (step + 1) % config.eval_every == 0):
            evaluate(step + 1)
        if end or (config.save_every and (step + 1) % config.save_every == 0):
            options = dataclasses.asdict(config)
            progress = checkpoint.Progress(step + 1, training.position, len(training.tokens), options)
            checkpoint.save(run, full_state(me.engine, me.model, me.mesh), progress, world, config.keep)
    if config.sample:
        weights = full_state(me.engine, me.model, me.mesh)["weights"]
        if leader:
            log.say(sample(weights, plan, run))
    validations = [line["val_loss"] for line in log.lines if "val_loss" in line]
    log.say(
        f"validation loss {validations[0]:.3f} -> {validations[-1]:.3f} nats per token after {config.steps} steps, "
        f"{time.perf_counter() - begin:.0f} s; checkpoint in {run}/checkpoints"
    )
    return log.lines


def sample(weights: dict[str, Tensor], plan: Plan, run: Path) -> str:
    """Continue the first 32 held-out tokens with chapter 01's Llama on this rank alone; also written to sample.txt."""
    config, corpus = plan.config, plan.corpus
    model = Llama(plan.model).to(plan.device, weight_dtype(config))
    model.load_state_dict(weights, strict=False)  # a tied head is in there once, as the embedding
    prompt = corpus.val[None, : min(32, config.seq_len)].long().to(plan.device)
    generator = torch.Generator().manual_seed(config.seed)
    tokens = generate(model, prompt, config.sample, 0.8, generator)[0].tolist()
    text = bytes(tokens).decode(errors="replace") if corpus.text else " ".join(map(str, tokens))
    (run / "sample.txt").write_text(text)
    return f"--- a sample: 32 tokens of the validation text, continued ---\n{text}\n---"


# --------------------------------------------------------------------------------------------- what is kept


def agree_on_folder(plan: Plan) -> Path:
    """The run folder: the resumed one, the one asked for, or runs/ and the time on the clock of the first rank."""
    if plan.resume:
        return plan.resume[0]
    name = [plan.config.out or f"runs/{datetime.now():%Y%m%d-%H%M%S}"]
    dist.broadcast_object_list(name, src=0)
    Path(name[0]).mkdir(parents=True, exist_ok=True)
    return Path(name[0])


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
        if path.exists():  # resumed: what came after the checkpoint is about to happen again
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


def interrupted(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def main() -> int:
    rank, local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    try:
        plan = prepare(sys.argv[1:], int(os.environ.get("WORLD_SIZE", 1)), local_rank)
    except UsageError as error:
        if local_rank == 0:  # all ranks of a node say the same
            print(f"train.py: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, interrupted)  # torchrun passes Ctrl-C on as SIGTERM
    signal.signal(
        signal.SIGINT, interrupted
    )  # Python's own, which is not there in a job that a shell put in background
    connect(plan.device, plan.config.timeout)
    run = agree_on_folder(plan)
    try:
        train(plan, run)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # both arrive when torchrun is in the foreground
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank == 0:
            saved = checkpoint.complete(run)
            print("\nstopped; " + (f"go on with --resume {run}" if saved else "nothing saved yet"), file=sys.stderr)
        os._exit(130)  # other ranks may be in the middle of a collective: do not wait for them
    gc.collect()  # whatever still points into the group would keep its threads alive beyond the next line
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
