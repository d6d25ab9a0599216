"""The trainer: a Llama on real data on many ranks, every technique imported from the chapter that teaches it.

    options.py     every option                         chapters.py    finds the chapters' folders
    data.py        tokens to micro-batches              01  llama, single_gpu, accounting: model, step, FLOPs
    model.py       the presets                          02  data_parallel: gradients reduced in buckets
    checkpoint.py  save, find, load

One step of one rank, of `dp` data-parallel ranks:

    micro-batches of this rank -> valid tokens of the global batch (one number, all-reduced)
      for each: loss = sum over its tokens / that number; backward      nothing is sent, except in the last one,
      finish: every gradient is the sum over all ranks                  where buckets leave while backward runs
    norm of the gradient, clip, AdamW: the same numbers on every rank, so the weights stay the same

    python 11_5d_trainer/train.py                                       one rank
    torchrun --nproc_per_node 4 11_5d_trainer/train.py                  4 ranks: nccl on GPUs, else gloo
    torchrun --nproc_per_node 4 11_5d_trainer/train.py --data my.txt --steps 2000 --seq-len 256 --out runs/mine
    torchrun --nproc_per_node 4 11_5d_trainer/train.py --resume runs/mine

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
from data_parallel import BucketedReducer, broadcast_parameters, global_valid_tokens
from llama import IGNORE, Llama, LlamaConfig
from model import PRESETS, build
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
    config.accumulation(world_size)
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


@torch.no_grad()
def validate(model: Llama, sampler: Sampler, config: Config, group: dist.ProcessGroup, device: torch.device) -> float:
    """Loss per token over the first `eval_samples` held-out samples, which the ranks share out."""
    total = torch.zeros(2, dtype=torch.float64, device=device)  # sum of losses, number of tokens
    rank, dp = dist.get_rank(group), dist.get_world_size(group)
    for tokens, labels in sampler.held_out(config.eval_samples, config.micro_batch, rank, dp):
        tokens, labels = tokens.to(device), labels.to(device)
        with precision(config, device):
            loss = model.parts.cross_entropy(model(tokens), labels)
        total += torch.stack([loss.double(), (labels != IGNORE).sum().double()])
    dist.all_reduce(total, group=group)
    return (total[0] / total[1]).item()


def precision(config: Config, device: torch.device) -> Any:
    return torch.autocast(device.type, torch.bfloat16) if config.precision == "bf16" else nullcontext()


def train_step(
    model: Llama,
    reducer: BucketedReducer,
    optimizer: torch.optim.Optimizer,
    batches: list[tuple[Tensor, Tensor]],
    config: Config,
    group: dist.ProcessGroup,
) -> tuple[float, float]:
    """One step on the global batch. Returns its loss per token and the norm of its gradient, before clipping."""
    device = next(model.parameters()).device
    valid = global_valid_tokens(torch.cat([labels.flatten() for _, labels in batches]).to(device), group)
    total = torch.zeros((), dtype=torch.float64, device=device)
    optimizer.zero_grad()
    for i, (tokens, labels) in enumerate(batches):
        last = i == len(batches) - 1
        with nullcontext() if last else reducer.no_sync():
            with precision(config, device):
                loss = model.parts.cross_entropy(model(tokens.to(device)), labels.to(device)) / valid
            loss.backward()
        total += loss.detach()
    reducer.finish()
    dist.all_reduce(total, group=group)  # to show it: each rank knows the loss of its own tokens
    # Every rank holds the whole gradient, summed, so its norm is the norm over all ranks.
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip or math.inf)
    optimizer.step()
    return total.item(), norm.item()


def train(plan: Plan, run: Path, group: dist.ProcessGroup) -> list[Log]:
    """Train as planned on the ranks of `group`, writing into the folder `run`. Returns the log's lines."""
    config, device = plan.config, plan.device
    rank, dp = dist.get_rank(group), dist.get_world_size(group)
    accumulation = config.accumulation(dp)
    dtype = torch.float64 if config.precision == "fp64" else torch.float32  # of the weights, also under autocast
    model = build(plan.model, recompute=config.recompute, seed=config.seed, dtype=dtype, device=device)
    broadcast_parameters(model, group)  # the same seed gave the same weights; this makes it certain
    optimizer = adamw(model, config.lr)
    optimizer.param_groups[0]["weight_decay"] = config.weight_decay
    reducer = BucketedReducer(model, group, bucket_bytes=int(config.bucket_mib * 2**20))
    training = Sampler(plan.corpus.train, config.seq_len, plan.corpus.vocab_size, config.seed)
    held_out = Sampler(plan.corpus.val, config.seq_len, plan.corpus.vocab_size, config.seed)

    first = 0
    if plan.resume:
        _, path, progress = plan.resume
        checkpoint.load(path, model, optimizer, group)
        first, training.position = progress.step, progress.samples
        checkpoint.set_aside_later(run, first, group)
    log = Logger(run, config, first, rank == 0)
    tokens_per_step = config.global_batch * config.seq_len
    samples = config.micro_batch * accumulation  # of one rank
    flops = step_flops(plan.model, samples, config.seq_len, config.recompute).model
    peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    log.say(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {dp} data-parallel rank(s) on {device.type}; "
        f"global batch {config.global_batch} samples = {config.micro_batch} micro-batch x {accumulation} accumulation "
        f"x {dp} dp = {tokens_per_step:,} tokens; {len(plan.corpus.train):,} training tokens; writing {run}"
    )

    def evaluate(step: int) -> None:
        log.write({"step": step, "val_loss": validate(model, held_out, config, group, device)})

    if first == 0:
        evaluate(0)
    begin = time.perf_counter()
    bar = tqdm(range(first, config.steps), initial=first, total=config.steps, disable=rank != 0, **log.bar_options)
    for step in bar:
        start = time.perf_counter()
        for parameters in optimizer.param_groups:
            parameters["lr"] = learning_rate(step, config)
        batches = training.step(config.micro_batch, accumulation, rank, dp)
        loss, norm = train_step(model, reducer, optimizer, batches, config, group)
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
            state = checkpoint.Progress(step + 1, training.position, len(training.tokens), options)
            checkpoint.save(run, model, optimizer, state, group, config.keep)
    if rank == 0 and config.sample:
        log.say(sample(model, plan.corpus, config, run))
    validations = [line["val_loss"] for line in log.lines if "val_loss" in line]
    summary = (
        f"validation loss {validations[0]:.3f} -> {validations[-1]:.3f} nats per token after {config.steps} steps, "
        f"{time.perf_counter() - begin:.0f} s; checkpoint in {run}/checkpoints"
    )
    log.say(summary)
    return log.lines


def sample(model: Llama, corpus: Corpus, config: Config, run: Path) -> str:
    """Continue the first 32 held-out tokens; also written to sample.txt."""
    prompt = corpus.val[None, : min(32, config.seq_len)].long()
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(config.seed)
    tokens = generate(model, prompt.to(device), config.sample, 0.8, generator)[0].tolist()
    text = bytes(tokens).decode(errors="replace") if corpus.text else " ".join(map(str, tokens))
    (run / "sample.txt").write_text(text)
    return f"--- a sample: 32 tokens of the validation text, continued ---\n{text}\n---"


# --------------------------------------------------------------------------------------------- what is kept


def agree_on_folder(plan: Plan, group: dist.ProcessGroup) -> Path:
    """The run folder: the resumed one, the one asked for, or runs/ and the time on the clock of the first rank."""
    if plan.resume:
        return plan.resume[0]
    name = [plan.config.out or f"runs/{datetime.now():%Y%m%d-%H%M%S}"]
    dist.broadcast_object_list(name, group_src=0, group=group)
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
    connect(plan.device, plan.config.timeout)
    world = dist.group.WORLD
    assert world is not None
    run = agree_on_folder(plan, world)
    try:
        train(plan, run, world)
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
