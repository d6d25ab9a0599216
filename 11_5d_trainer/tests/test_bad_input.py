"""Wrong configurations: each ends before any process group is made, in the one line that is written here."""

import argparse
import dataclasses
import json
import os

import paths  # noqa: F401  finds the chapters below
import checks
import fuzz
import prepare
import pytest
import torch
import torch.distributed as dist
import train
from harness.meter import held_bytes
from harness.ranks import run_ranks
from options import Config, UsageError, parse
from test_train import TEXT, arguments, losses, train_on

HF_LLAMA = dict(model_type="llama", vocab_size=100, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)
HF_LLAMA |= dict(num_key_value_heads=2, intermediate_size=24, rms_norm_eps=1e-5)


def write_files(folder):
    """Files and folders with something wrong, which the cases below name."""
    (folder / "empty.txt").write_text("")
    (folder / "short.txt").write_text("only a few words")
    (folder / "odd.bin").write_bytes(b"abc")
    (folder / "ids.bin").write_bytes(bytes([1, 0] * 5000 + [255, 255]))
    (folder / "empty.bin").write_bytes(b"")
    (folder / "folder").mkdir()
    (folder / "folder.bin").mkdir()
    (folder / "run").mkdir()
    (folder / "run" / "log.jsonl").write_text("")
    (folder / "unfinished" / "checkpoints" / ".writing-000004").mkdir(parents=True)
    (folder / "half").mkdir()
    (folder / "half" / "train.bin").write_bytes(bytes(100))
    models = {
        "bert": {"model_type": "bert"},
        "stretched": HF_LLAMA | {"rope_scaling": {"rope_type": "llama3"}},
        "wide-heads": HF_LLAMA | {"head_dim": "32"},
        "few-sizes": {"model_type": "llama"},
        "odd-heads": HF_LLAMA | {"num_attention_heads": 3, "hidden_size": 18},
        "few-tokens": HF_LLAMA,
    }
    for name, config in models.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    (folder / "many").mkdir()
    for i in range(20):
        (folder / "many" / f"{i:02}.txt").write_text("a text of some length. " * 40)
    settings = dict(field="text", chat=False, tokenizer="", eos="", val_every=10, workers=1)
    prepare.prepare_all(argparse.Namespace(sources=[str(folder / "many")], out=str(folder / "tokens"), **settings))
    files = {
        "torn.toml": "lr =",
        "list.json": "[1]",
        "key.toml": "seqlen = 8",
        "table.toml": "[model]",
        "type.toml": "steps = 1.5",
    }
    files |= {"bool.toml": "lr = true", "choice.toml": "zero = 4", "value.toml": "micro_batch = 0"}
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "torn").mkdir()
    (folder / "torn" / "config.json").write_text("{")


# (options, start of the line, ranks if several); {d} is the folder of these files, {text} a text that is all right.
OPTIONS = [
    ("--stepz 3", "unrecognized arguments: --stepz 3; --help lists the options"),
    ("--tp 2 extra", "unrecognized arguments: extra; --help lists the options", 2),
    ("--tp", "argument --tp: expected one argument; --help lists the options"),
    ("--steps many", "argument --steps: invalid int value: 'many'; --help lists the options"),
    ("--lr fast", "argument --lr: invalid float value: 'fast'; --help lists the options"),
    ("--preset huge", "argument --preset: invalid choice: 'huge' (choose from "),
    ("--zero 4", "argument --zero: invalid choice: 4 (choose from "),
    ("--cp-kind star", "argument --cp-kind: invalid choice: 'star' (choose from "),
    ("--schedule zigzag", "argument --schedule: invalid choice: 'zigzag' (choose from "),
    ("--recompute some", "argument --recompute: invalid choice: 'some' (choose from "),
    ("--precision int4", "argument --precision: invalid choice: 'int4' (choose from "),
    ("--router hash", "argument --router: invalid choice: 'hash' (choose from "),
    ("--on-nan ignore", "argument --on-nan: invalid choice: 'ignore' (choose from "),
    ("--micro-batch 0", "--micro-batch 0 must be at least 1"),
    ("--steps -1", "--steps -1 must be at least 1"),
    ("--pp 0", "--pp 0 must be at least 1"),
    ("--ep 0", "--ep 0 must be at least 1"),
    ("--seq-len 0", "--seq-len 0 must be at least 1"),
    ("--keep 0", "--keep 0 must be at least 1"),
    *((f"--{name} 0", f"--{name} 0 must be at least 1") for name in ("tp", "cp", "top-k", "eval-samples")),
    ("--experts -1", "--experts -1 must not be negative"),
    ("--fpdt-chunks -1", "--fpdt-chunks -1 must not be negative"),
    ("--vocab-size -3", "--vocab-size -3 must not be negative"),
    ("--lr nan", "--lr nan must be a positive number"),
    ("--lr 0", "--lr 0.0 must be a positive number"),
    ("--bucket-mib 0", "--bucket-mib 0.0 must be a positive number"),
    ("--loss-scale -2", "--loss-scale -2.0 must be at least 1"),
    ("--loss-scale 0.5 --precision fp16", "--loss-scale 0.5 must be at least 1"),
    ("--timeout inf", "--timeout inf must be a positive number"),
    ("--timeout 1e15", "--timeout 1000000000000000.0 must be at most 10,000,000"),
    ("--bucket-mib 1e306", "--bucket-mib 1e+306 must be at most 1,048,576"),
    ("--seed 99999999999999999999", "--seed 99999999999999999999 must be at most 1,099,511,627,776"),
    ("--seed -99999999999999", "--seed -99999999999999 must be at least -1,099,511,627,776"),
    ("--clip -1", "--clip -1.0 must not be negative"),
    ("--kernels triton --precision fp64", "--kernels triton: no kernel computes in fp64; use --kernels torch"),
    ("--kernels triton --precision bf16", "--kernels triton --precision bf16: Triton's interpreter rounds bf16"),
    ("--weight-decay nan", "--weight-decay nan must not be negative"),
    ("--weight-decay inf", "--weight-decay inf must be a finite number"),
    *((f"--{name} 1", f"--{name} 1.0 must be less than 1") for name in ("beta1", "beta2")),
    ("--beta1 -0.1", "--beta1 -0.1 must not be negative"),
    ("--lr-schedule linear", "argument --lr-schedule: invalid choice: 'linear' (choose from "),
    ("--decay-steps 9", "--decay-steps 9: a cosine decays from the warm-up on; add --lr-schedule wsd, or leave it"),
    (
        "--lr-schedule wsd --steps 50 --warmup 30 --decay-steps 40",
        "--warmup 30 and --decay-steps 40 are more than --steps 50; use fewer",
    ),
    ("--evaluate", "--evaluate needs something to validate; add --resume RUN or --init FOLDER"),
    ("--timeout 0.001", "--timeout 0.001 must be at least 1: in less, ranks do not even find one another"),
    ("--min-lr 1", "--min-lr 1 is more than --lr 0.003; use at most that"),
    ("--lr 1e-5 --min-lr 1e-4", "--min-lr 0.0001 is more than --lr 1e-05; use at most that"),
    ("--preset small --min-lr 2e-3", "--min-lr 0.002 is more than --lr 0.0014; use at most that"),
    ("--device tpu", "--device tpu: use auto, cpu or cuda"),
    ("--device mps", "--device mps: Apple's GPU has no float64, in which losses and norms are summed"),
    ("--steps 5 --warmup 9", "--warmup 9 is more than --steps 5; use at most 5"),
    ("--restart", "--restart goes on with the run in --out, which is missing; add --out FOLDER"),
    ("--restart --out a --resume b", "--restart goes on with --out, not with --resume b; leave one out"),
    ("--top-k 1", "--top-k 1: there are no experts; add --experts 8, or leave it out"),
    ("--router sigmoid", "--router sigmoid: there are no experts; add --experts 8, or leave it out"),
    ("--capacity 1.5", "--capacity 1.5: there are no experts; add --experts 8, or leave it out"),
    ("--schedule zb-h1", "--schedule zb-h1: there is no pipeline; add --pp 2, or leave it out"),
    ("--stages-per-rank 2", "--stages-per-rank 2: there is no pipeline; add --pp 2, or leave it out"),
    ("--cp-kind ring", "--cp-kind ring: each rank has whole sequences; add --cp 2, or leave it out"),
    ("--bias-speed 0.1", "--bias-speed 0.1: there are no experts; add --experts 8, or leave it out"),
]
FILES = [
    ("--data {d}none", "--data {d}none does not exist; give a text file, a folder or a .bin of tokens"),
    ("--data {d}empty.txt", "--data {d}empty.txt has 0 training tokens, too few for one sample of"),
    ("--data /proc/self/mem", "--data /proc/self/mem: /proc/self/mem cannot be read (Input/output error)"),
    ("--data {d}many --out {d}many/run", "--out {d}many/run lies in --data {d}many, whose text it would be; use"),
    ("--data {d}short.txt", "--data {d}short.txt has 15 training tokens, too few for one sample of"),
    ("--data {text} --seq-len 20000", "--data {text} has 10554 validation tokens, too few for one sample"),
    ("--data {d}folder", "--data {d}folder holds 0 text files; a folder needs two or more"),
    ("--data {d}folder.bin --vocab-size 9", "--data {d}folder.bin holds 0 text files; a folder needs two or more"),
    ("--data {d}half", "--data {d}half holds train.bin but no val.bin; add it, or name train.bin itself"),
    ("--data {d}ids.bin", "--vocab-size is missing: ids.bin holds token ids; GPT-2's tokenizer has 50257"),
    ("--data {d}odd.bin --vocab-size 9", "--data {d}odd.bin has 3 bytes, not a multiple of 2;"),
    ("--data {d}empty.bin --vocab-size 9", "--data {d}empty.bin has 0 training tokens, too few for"),
    (
        "--data {d}ids.bin --vocab-size 50257",
        "--data {d}ids.bin has token id 65535, beyond --vocab-size 50257; use at least 65536",
    ),
    ("--data {text} --vocab-size 65", "--data {text} has token id 117, beyond --vocab-size 65;"),
    ("--data {d}ids.bin --vocab-size 70000 --tokenizer t", "--tokenizer t reads text, but --data {d}ids.bin is tokens"),
    ("--options {d}none.toml", "--options {d}none.toml cannot be read (No such file or directory)"),
    ("--options {d}torn.toml", "--options {d}torn.toml is not TOML: "),
    ("--options {d}list.json", "--options {d}list.json is not JSON: no table of options"),
    ("--options {d}key.toml", "--options {d}key.toml: there is no option seqlen; the nearest name is seq_len"),
    ("--options {d}table.toml", "--options {d}table.toml: model is a table; options stand without one"),
    ("--options {d}type.toml", "--options {d}type.toml: steps = 1.5 must be a whole number"),
    ("--options {d}bool.toml", "--options {d}bool.toml: lr = True must be a number"),
    ("--options {d}choice.toml", "--options {d}choice.toml: argument --zero: invalid choice: 4 (choose from "),
    ("--options {d}value.toml", "--micro-batch 0 must be at least 1"),
    ("--resume {d}unfinished/best", "--resume {d}unfinished/best: no checkpoint of {d}unfinished was validated; use"),
    ("--out {d}run", "--out {d}run holds a run already; use --resume {d}run, or another folder"),
    ("--out {d}unfinished", "--out {d}unfinished holds a run already; use --resume {d}unfinished, or another"),
    ("--out {d}empty.txt/x", "--out {d}empty.txt/x cannot be written to (Not a directory)"),
    ("--resume {d}none", "--resume {d}none holds no complete checkpoint; give a run folder or a checkpoint in"),
    ("--resume {d}unfinished", "--resume {d}unfinished holds no complete checkpoint; give a run folder"),
    ("--init {d}none", "--init {d}none holds no config.json; give the folder of a Hugging Face model"),
    ("--init {d}bert", "--init {d}bert is a 'bert', but only llama, mistral, qwen2, qwen3, mixtral, qwen3_moe can"),
    ("--init {d}stretched", "--init {d}stretched has a RoPE of type llama3 without factor; copy it again"),
    ("--init {d}wide-heads", "--init {d}wide-heads has head_dim = '32'; it must be a whole number from 1 to"),
    ("--init {d}few-sizes", "--init {d}few-sizes: config.json has no vocab_size; copy it again"),
    ("--init {d}odd-heads", "--init {d}odd-heads: heads 3 is not a multiple of kv_heads 2"),
    ("--lora-rank 8", "--lora-rank 8 adapts a model that is there; add --init FOLDER"),
    ("--lora-alpha 4", "--lora-alpha 4.0: there are no adapters; add --lora-rank 8, or leave it out"),
    ("--init {d}torn", "--init {d}torn: config.json is not JSON; copy it again"),
    ("--init {d}few-tokens", "--init {d}few-tokens knows 100 tokens and the data has 256; add its --tokenizer"),
]
SIZES = [
    (
        "--global-batch 30 --micro-batch 8",
        "--global-batch and --micro-batch: global batch 30 is not a multiple of micro-batch 8 x 4",
        4,
    ),
    ("--global-batch 32", "--global-batch and --micro-batch: global batch 32 is not a multiple of micro-batch 8 x", 3),
    ("--tp 3", "--pp 1 x --tp 3 x --cp 1 does not divide the 4 ranks of this run; the product may be 1, 2, 4", 4),
    ("--pp 2", "--pp 2 x --tp 1 x --cp 1 does not divide the 1 ranks of this run; the product may be 1"),
    (
        "--pp 2 --tp 2 --cp 2",
        "--pp 2 x --tp 2 x --cp 2 does not divide the 12 ranks of this run; the product may be 1, 2, 3, 4, 6, 12",
        12,
    ),
    ("--tp 8", "--tp 8: 8 tensor-parallel ranks do not divide heads 4; use 1, 2, 4 ranks", 8),
    ("--cp 3 --global-batch 8", "--cp 3 --cp-kind zigzag: a sequence of 128 tokens does not divide", 3),
    (
        "--cp 2 --cp-kind ring --seq-len 31",
        "--cp 2 --cp-kind ring: a sequence of 31 tokens does not divide into the P = 2 parts of the contiguous layout; "
        "use 30 or 32",
        2,
    ),
    ("--cp 8 --cp-kind ulysses", "--cp 8 --cp-kind ulysses: 4 query heads do not divide among 8", 8),
    (
        "--cp 4 --cp-kind ulysses --tp 2",
        "--cp 4 --cp-kind ulysses: 2 query heads do not divide among 4 ranks of Ulysses; use 1, 2 ranks, or USP",
        8,
    ),
    ("--sequence-parallel", "--sequence-parallel cuts over tensor-parallel ranks, and --tp is 1; use --tp 2"),
    ("--tp 2 --sequence-parallel --seq-len 65", "--tp 2: 2 tensor-parallel ranks do not divide sequence 65", 2),
    ("--tp 2 --cp 2 --cp-kind ring --sequence-parallel --seq-len 66", "--tp 2: 2 tensor-parallel ranks do not div", 4),
    ("--pp 8", "--pp 8 --schedule 1f1b --stages-per-rank 1: 4 layers are too few for 8 stages; use fewer stages", 8),
    ("--pp 2 --schedule zb-v", "--pp 2 --schedule zb-v --stages-per-rank 1: zb-v: 1 stages per rank; use 2, one on", 2),
    (
        "--pp 2 --stages-per-rank 2",
        "--pp 2 --schedule 1f1b --stages-per-rank 2: 1f1b: 2 stages per rank; use 1, or one of interleaved, breadth",
        2,
    ),
    (
        "--pp 2 --schedule interleaved --stages-per-rank 2 --global-batch 24",
        "--pp 2 --schedule interleaved --stages-per-rank 2: interleaved: 3 micro-batches are no multiple of 2 ranks;",
        2,
    ),
    (
        "--pp 2 --schedule dualpipe --micro-batch 16",
        "--pp 2 --schedule dualpipe --stages-per-rank 1: dualpipe: 2 micro-batches for 2 ranks; use an even number of",
        2,
    ),
    (
        "--pp 3 --schedule dualpipe --global-batch 48",
        "--pp 3 --schedule dualpipe --stages-per-rank 1: dualpipe: 3 ranks; use an even number, because each rank",
        3,
    ),
    ("--experts 4 --ep 3", "--ep 3 does not divide the 2 ranks of data x context; use 1, 2", 2),
    ("--experts 4 --ep 2 --tp 2", "--ep 2 does not divide the 1 ranks of data x context; use 1", 2),
    ("--experts 3 --ep 2", "--experts 3 --top-k 2 --ep 2: experts 3 do not divide among 2 expert-parallel ranks;", 2),
    ("--dispatch once", "--dispatch once: there are no experts; add --experts 8, or leave it out"),
    ("--experts 4 --dispatch fixed --precision fp16", "--dispatch fixed multiplies all experts at once, and --p"),
    ("--experts 4 --dispatch fixed --precision fp8-row", "--dispatch fixed multiplies all experts at once, and --"),
    ("--experts 4 --dispatch fixed --kernels cuda", "--dispatch fixed multiplies all experts at once, and --kernels"),
    ("--experts 4 --top-k 5", "--experts 4 --top-k 5 --ep 1: top-k 5 of 4 experts is impossible; use 1 to 4"),
    ("--fpdt-chunks 3", "--fpdt-chunks 3: 128 tokens do not divide into 3 chunks on 1 ranks; use a multiple of 3"),
    ("--fpdt-chunks 128", "--fpdt-chunks 128: a chunk of a rank has 1 tokens; must be even"),
    ("--cp 2 --cp-kind ulysses --fpdt-chunks 64", "--fpdt-chunks 64: a chunk of a rank has 1 tokens; must be", 2),
]
EXCLUDED = [  # each is fine without the other
    ("--pp 2 --zero 3", "--zero 3 with --pp: a layer would be gathered again for each micro-batch in flight; use -", 2),
    ("--zero-offload", "--zero-offload is a variant of ZeRO's stages 2 or 3; use one of them, not --zero 0"),
    ("--zero 1 --zero-offload", "--zero-offload is a variant of ZeRO's stages 2 or 3; use one of them, not --z"),
    ("--zero 3 --zero-late-gather", "--zero-late-gather is a variant of ZeRO's stages 1 or 2; use one of them"),
    ("--zero-shards 2", "--zero-shards 2 is a variant of ZeRO's stages 1, 2 or 3; use one of them, not --zero 0", 4),
    ("--zero 2 --zero-shards -1", "--zero-shards -1 must not be negative", 4),
    ("--zero 2 --zero-shards 3", "--zero-shards 3 does not divide the 4 ranks that hold the same weights; use 1", 4),
    ("--zero 2 --zero-shards 2 --zero-offload", "--zero-offload cannot go with --zero-shards 2: each is a ZeRO of", 4),
    ("--zero 2 --zero-late-gather --zero-offload", "--zero-offload cannot go with --zero-late-gather: each is a"),
    ("--zero 2 --zero-shards 2 --experts 4 --ep 2", "--zero-shards 2 cannot go with --ep 2: experts lie across", 4),
    ("--zero 2 --reduce-dtype fp32", "--reduce-dtype fp32: gradients of --precision fp32 are that wide already"),
    ("--accumulate-dtype fp32 --precision bf16", "--accumulate-dtype fp32: gradients of --precision bf16 are that"),
    (
        "--zero 1 --precision bf16-master --accumulate-dtype fp32 --pp 2",
        "--accumulate-dtype fp32 cannot go with --pp: a pipeline sums its micro-batches before ZeRO sees them; leave",
        2,
    ),
    ("--tp-overlap", "--tp-overlap hides what tensor-parallel ranks send, and --tp is 1; use --tp 2 or more"),
    ("--tp 2 --tp-overlap --precision fp8-row", "--tp-overlap takes the products of a layer apart, and --precision", 2),
    ("--tp 2 --tp-overlap --precision fp16", "--tp-overlap takes the products of a layer apart, and --precision", 2),
    ("--tp 2 --tp-overlap sometimes", "argument --tp-overlap: invalid choice: 'sometimes' (choose from ", 2),
    ("--tp-overlap domino", "--tp-overlap hides what tensor-parallel ranks send, and --tp is 1; use --tp 2 or more"),
    ("--tp 2 --tp-overlap domino --precision fp8-row", "--tp-overlap takes the products of a layer apart, and --pr", 2),
    *(
        (f"--tp 2 --tp-overlap domino {other}", f"--tp-overlap domino cannot go with {' '.join(words)}: ", *ranks)
        for other, words, *ranks in (
            ("--micro-batch 1", ["--micro-batch", "1"], 2),
            ("--experts 4", ["--experts"], 2),
            ("--recompute full", ["--recompute", "full"], 2),
            ("--zero 1 --zero-late-gather", ["--zero-late-gather"], 4),
            ("--pp 2 --schedule zb-h1", ["--schedule", "zb-h1"], 4),
            ("--pp 2 --schedule dualpipe", ["--schedule", "dualpipe"], 4),
        )
    ),
    ("--ep 2", "--ep 2: there are no experts to share out; add --experts 8, or leave it out", 2),
    ("--experts 4 --bias-speed 0.1", "--experts 4 --top-k 2 --ep 1: bias-speed needs the sigmoid router"),
    ("--precision bf16-master --zero 0", "--precision bf16-master keeps the fp32 weights in ZeRO's shards; use --zero"),
    ("--fpdt-chunks 2 --tp 2", "--fpdt-chunks 2 cannot go with --tp: it runs the backward of a whole dense block", 2),
    ("--fpdt-chunks 2 --pp 2", "--fpdt-chunks 2 cannot go with --pp: it runs the backward of a whole dense block", 2),
    ("--fpdt-chunks 2 --experts 4", "--fpdt-chunks 2 cannot go with --experts: it runs the backward of a whole"),
    ("--fpdt-chunks 2 --recompute full", "--fpdt-chunks 2 cannot go with --recompute full: it runs the backward"),
    ("--fpdt-chunks 2 --precision bf16", "--fpdt-chunks 2 cannot go with --precision bf16: it runs the backward"),
    (
        "--fpdt-chunks 2 --cp 2 --cp-kind ring",
        "--fpdt-chunks 2 exchanges heads as Ulysses does; use --cp-kind ulysses, not ring",
        2,
    ),
]
DOCUMENTS = [
    ("--documents", "--documents: --data {text} does not say where documents begin; make tokens with prepare.py"),
    *(
        (f"--documents --data {{d}}tokens {option}", f"--documents cannot go with {said}: ", *ranks)
        for option, said, *ranks in (
            ("--pp 2", "--pp", 2),
            ("--cp 2 --cp-kind usp", "--cp-kind usp", 2),
            ("--fpdt-chunks 2", "--fpdt-chunks"),
            ("--tp 2 --tp-overlap domino", "--tp-overlap domino", 2),
            ("--kernels cuda", "--kernels cuda"),
            ("--compile", "--compile"),
        )
    ),
]
KERNELS = [
    *(
        (f"--device cpu --compile {words}", f"--compile cannot go with {line}", *ranks)
        for words, line, *ranks in (
            ("--tp 2", "--tp 2, which waits for other ranks inside a block", 2),
            ("--cp 2", "--cp 2, which waits for other ranks", 2),
            ("--experts 4", "--experts 4, which learns inside a block how many rows there are"),
            ("--zero 3", "--zero 3, which waits for other ranks"),
            ("--zero 1 --zero-late-gather", "--zero-late-gather, which waits for other ranks"),
            ("--pp 2 --schedule zb-h1", "--schedule zb-h1, which runs a block's backward in its own way", 2),
            ("--fpdt-chunks 2", "--fpdt-chunks 2, which runs a block's backward in its own way"),
            ("--recompute full", "--recompute full, which runs a block's backward in its own way"),
            ("--recompute selective", "--recompute selective, which runs a block's backward in its own way"),
            ("--precision fp8-row", "--precision fp8-row, which keeps its scales from step to step"),
            ("--kernels triton", "--kernels triton, which brings kernels that are compiled already"),
        )
    ),
    *(
        (f"--device cpu --kernels cuda {words}", f"--kernels cuda{line}", *ranks)
        for words, line, *ranks in (
            ("--precision fp32", " --precision fp32: chapter 09's CUDA multiplies in bf16; use bf16 or bf16-master"),
            ("--precision bf16 --tp 2 --tp-overlap", " cannot go with --tp-overlap backward, which has products of", 2),
            ("--precision bf16-master --zero 1 --fpdt-chunks 2", " cannot go with --fpdt-chunks 2, which has products"),
            ("--precision bf16", ": a head of 32 numbers; the CUDA attention takes 64 and 128, use other --heads"),
            ("--precision bf16 --heads 2", " needs a Hopper GPU (sm_90a), and there is no GPU here; use --kernels to"),
        )
    ),
]
CASES = [*OPTIONS, *FILES, *SIZES, *EXCLUDED, *DOCUMENTS, *KERNELS]


def refusal(words, ranks=1):
    with pytest.raises(UsageError) as refused:
        train.prepare(words, ranks)
    assert not dist.is_initialized()
    said = str(refused.value)
    assert "\n" not in said
    return said


def test_bad_input_is_refused_in_one_line_before_any_process_group(tmp_path, text):
    write_files(tmp_path)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for line, start, *ranks in CASES:
        words = [word.format(d=f"{tmp_path}/", text=text) for word in line.split()]
        words = words if "--data" in words or "--resume" in words else ["--data", text, *words]
        said, start = refusal(words, *ranks), start.format(d=f"{tmp_path}/", text=text)
        assert said.startswith(start), f"{line}: {said}"
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files
    train.prepare(["--data", f"{tmp_path}/tokens", "--out", f"{tmp_path}/tokens/run"], 1)  # which are not read as text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused():
    assert refusal(["--device", "cuda"]) == "--device cuda: there is no GPU here; use --device cpu"


def test_more_ranks_than_gpus_are_refused_on_every_rank(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for local_rank in range(4):
        with pytest.raises(UsageError, match="--nproc_per_node 4 is more than the 1 GPU.* or use --device cpu"):
            train.find_device("auto", local_rank)
        assert train.find_device("cpu", local_rank).type == "cpu"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)  # as many as there are ranks
    assert [train.find_device("auto", rank) for rank in (0, 3)] == [torch.device("cuda", rank) for rank in (0, 3)]


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        (
            {"LOCAL_WORLD_SIZE": "two"},
            "LOCAL_WORLD_SIZE=two in the environment must be a whole number from 1; unset it",
        ),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0 in the environment must be a whole number from 1; unset it"),
        ({"RANK": "-1"}, "RANK=-1 in the environment must be a whole number from 0; unset it"),
        ({"RANK": "0"}, "RANK is in the environment, but no WORLD_SIZE; unset it, or start with torchrun"),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"},
            "RANK is in the environment, but no MASTER_PORT",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "a"},
            "MASTER_PORT=a in the environment must be a whole number from 0; unset it",
        ),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is in the environment, but no RANK; unset it, or start with torchrun"),
        ({"LOCAL_RANK": "1.0"}, "LOCAL_RANK=1.0 in the environment must be a whole number from 0; unset it"),
        (
            {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "", "MASTER_PORT": "1"},
            "RANK=2 in the environment is not below",
        ),
    ],
)
def test_an_environment_that_is_not_torchruns_is_refused_in_one_line(environment, line, monkeypatch, capsys):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(train, "connect", lambda *_: pytest.fail("a process group was started"))
    monkeypatch.setattr(train.sys, "argv", ["train.py", "--steps", "1"])
    assert train.main() == 2
    said = capsys.readouterr().err
    assert said.startswith(f"train.py: {line}") and said.count("\n") == 1


def test_options_come_from_a_file_and_the_command_line_wins(text, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(f'data = "{text}"\nsteps = 50\nmin-lr = 0\ntied = true\ntp_overlap = "none"\nseq_len = 64')
    config = train.prepare(["--seq-len", "32", "--options", str(file), "--no-tied"], 1).config
    assert (config.steps, config.min_lr, config.tied, config.seq_len, config.data) == (50, 0.0, False, 32, text)
    stored = tmp_path / "config.json"  # of a run, which notes the options that it left alone, too
    about = Config(out="there", resume="run", evaluate=True, steps=50, hidden=64, experts=4)
    stored.write_text(json.dumps(dataclasses.asdict(about)))
    given = parse(["--options", str(stored), "--steps", "40"])
    assert (given["steps"], given["hidden"], given["experts"], given["seq_len"]) == (40, 64, 4, 128)
    assert not given.keys() & {"out", "resume", "restart", "evaluate", "show_mesh", "preset", "layers", "tied", "top_k"}


def test_values_at_their_limits_are_taken():
    Config(seed=2**40, bucket_mib=2.0**20, timeout=1.0, min_lr=3e-3, steps=50, warmup=30, decay_steps=20).check()
    Config(seed=-(2**40), timeout=1e7, beta1=0.0, steps=30, warmup=30).check()


@pytest.mark.prove
def test_the_config_json_of_a_run_begins_the_same_run_elsewhere(text, tmp_path):
    log, folder = train_on(2, [*arguments(text, experts=4), "--zero", "1", "--out", str(tmp_path / "run")])
    again, other = train_on(2, ["--options", f"{folder}/config.json", "--out", str(tmp_path / "again")])
    assert losses(again) == losses(log) and other != folder
    first, second = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("run", "again"))
    assert first | {"out": second["out"]} == second


WORLDS = {"laptop": 2, "one_gpu": 1, "eight_gpus": 8, "slurm": 16}


@pytest.mark.parametrize("name", WORLDS)
def test_examples_of_option_files_fit_the_ranks_and_the_memory_that_they_name(name, text, monkeypatch):
    folder = fuzz.Path(train.__file__).parent / "examples"
    assert sorted(WORLDS) == sorted(file.stem for file in folder.glob("*.toml"))
    monkeypatch.setattr(checks, "memory_of_a_rank", lambda device: 80 * 10**9)
    long = "\n".join([fuzz.Path(text).read_text()] * 4)  # also the tenth for validation has a sample
    data = fuzz.Path(text).with_name("long.txt")
    data.write_text(long)
    words = ["--options", str(folder / f"{name}.toml"), "--data", str(data), "--device", "cpu"]
    config = train.prepare(words, WORLDS[name]).config
    assert config.lr == pytest.approx(10 * config.min_lr) and config.steps >= 4000


def test_of_a_preset_with_experts_a_token_uses_as_many_as_asked(text):
    sparse = train.prepare(["--data", text, "--preset", "mixtral-8x7b", "--top-k", "1", "--show-mesh"], 1)
    assert (sparse.config.experts, sparse.config.mixture(sparse.model).top_k) == (8, 1)
    assert Config(experts=4, balance=0.0).mixture(sparse.model).balance == 0.0, "0 is none, and not the default"


# ------------------------------------------------------------------------------------- what does not fit a checkpoint

# Of a run with 4 experts, in steps of 8 samples of 16 tokens.
ANOTHER_RUN = [
    ("--seq-len 8", "--seq-len 8 does not fit {c}, which was trained with 16; leave it out"),
    ("--global-batch 4", "--global-batch 4 does not fit {c}, which was trained with 8; leave it out"),
    ("--preset small", "--preset small does not fit {c}, which was trained with tiny; leave it out"),
    ("--seed 1", "--seed 1 does not fit {c}, which was trained with 0; leave it out"),
    ("--tied", "--tied True does not fit {c}, which was trained with False; leave it out"),
    ("--documents", "--documents True does not fit {c}, which was trained with False; leave it out"),
    ("--tokenizer gpt2", "--tokenizer gpt2 does not fit {c}, which was trained with ; leave it out"),
    ("--vocab-size 50257", "--vocab-size 50257 does not fit {c}, which was trained with 0; leave it out"),
    ("--experts 8", "--experts 8 does not fit {c}, which was trained with 4; leave it out"),
    ("--router sigmoid", "--router sigmoid does not fit {c}, which was trained with softmax; leave it out"),
    ("--precision bf16", "--precision bf16 does not fit {c}, which was trained with fp64; leave it out"),
    ("--lora-rank 8", "--lora-rank 8 does not fit {c}, which was trained with 0; leave it out"),
    ("--data other.txt", "--data other.txt does not exist; give a text file, a folder or a .bin of tokens"),
    ("--init llama", "--init llama does not fit {c}, which was trained with ; leave it out"),
    ("--out x", "--out x cannot go with --resume: a resumed run goes on in its own folder"),
    ("--ep 3", "--ep 3 does not divide the 2 ranks of data x context; use 1, 2", 2),
    ("--tp 8 --micro-batch 1", "--tp 8: 8 tensor-parallel ranks do not divide heads 4; use 1, 2, 4 ranks", 8),
    ("--pp 2 --zero 3", "--zero 3 with --pp: a layer would be gathered again for each micro-batch in flight;", 2),
]


def test_options_that_would_make_it_another_run_are_refused_on_resume(text, tmp_path):
    _, folder = train_on(1, [*arguments(text, experts=4, steps=2), "--out", str(tmp_path / "run")])
    newest = f"{folder}/checkpoints/step-000002"
    for line, start, *ranks in ANOTHER_RUN:
        said = refusal(["--resume", folder, "--steps", "12", *line.split()], *ranks)
        assert said.startswith(start.format(c=newest)), f"{line}: {said}"
    assert refusal(["--resume", folder]) == f"--steps 2: {newest} has done 2 already; ask for more"
    assert train.prepare(["--resume", folder, "--steps", "12"], 1).config.steps == 12


def test_data_are_known_again_by_their_contents_on_resume_and_not_by_their_name(tmp_path):
    data = tmp_path / "data.txt"
    data.write_text(TEXT)
    _, folder = train_on(1, [*arguments(str(data), steps=2), "--out", str(tmp_path / "run")])
    data.write_text(TEXT + "one more line\n")
    said = refusal(["--resume", folder, "--steps", "12"])
    assert f"was trained on 94,987 tokens, but --data {data} now has 95,000" in said, said
    data.write_text(TEXT.replace("7", "8"))
    said = refusal(["--resume", folder, "--steps", "12"])
    assert said == f"--resume {folder}: --data {data} has other contents or weights than it had then"
    data.unlink()
    said = refusal(["--resume", folder, "--steps", "12"])
    assert said == f"--resume {folder}: its --data {data} is not there; if it has moved, say --data PLACE"
    moved = tmp_path / "elsewhere.txt"
    moved.write_text(TEXT)
    plan = train.prepare(["--resume", folder, "--steps", "12", "--data", str(moved)], 1)
    assert plan.config.data == str(moved) and plan.resume[2].step == 2
    old = tmp_path / "run" / "checkpoints" / "step-000002" / "manifest.json"  # of before contents were noted
    old.write_text(old.read_text().replace(f'"data": "{plan.corpus.fingerprint}"', '"data": ""'))
    said = refusal(["--resume", folder, "--steps", "12", "--data", str(moved)])
    assert said.startswith(f"--data {moved} does not fit {old.parent}, which was trained with {data}; leave it out")


def test_a_bin_without_a_meta_file_is_known_again_too(tmp_path):
    data, words = tmp_path / "ids.bin", ["--vocab-size", "9", "--out", str(tmp_path / "run")]
    data.write_bytes(bytes([1, 0] * 5000))
    _, folder = train_on(1, [*arguments(str(data), steps=2), *words])
    train.prepare(["--resume", folder, "--steps", "12"], 1)
    data.write_bytes(bytes([2, 0] * 5000))
    said = refusal(["--resume", folder, "--steps", "12"])
    assert said == f"--resume {folder}: --data {data} has other contents or weights than it had then"


# ------------------------------------------------------------------------------------------------------- memory


def held_on_this_rank(words):
    me, batches = fuzz.made(words, fuzz.SIZES)
    fuzz.step_module.train_step(me, batches())
    inner = [owner.optimizer for owner in me.owners]
    states = sum(held_bytes([], optimizer).optimizer for optimizer in inner)
    return held_bytes(me.model).parameters + states


@pytest.mark.parametrize(
    "layout", ["", "--tp 2", "--tp 2 --experts 4", "--pp 2", "--pp 2 --schedule dualpipe --micro-batch 1"]
)
def test_the_estimate_is_the_least_of_what_the_fullest_rank_holds_and_near_it(layout, text):
    words = fuzz.options(text, layout)
    need = checks.least_bytes(Config(**parse(words)), fuzz.SIZES, 2)
    held = max(run_ranks(2, held_on_this_rank, words))
    assert 0.95 * held < need["weights"] + need["AdamW's states"] <= held
    assert need["gradients"] == need["weights"]


def test_each_way_to_share_the_model_out_lowers_the_estimate_by_what_it_shares():
    def need(words, ranks, **sizes):
        config = Config(**parse(["--global-batch", "128", "--micro-batch", "1", *words.split()]))
        return checks.least_bytes(config, dataclasses.replace(fuzz.SIZES, **sizes), ranks)

    whole = need("", 4)
    biased, halves = (need(words, 4, qkv_bias=True)["weights"] - need(words, 4)["weights"] for words in ("", "--tp 2"))
    assert halves == biased / 2 > 0, "biases are cut as their layer is"
    assert need("--evaluate", 4) == {"weights": whole["weights"]}
    assert need("--zero 1", 4)["AdamW's states"] == whole["AdamW's states"] / 4
    assert need("--zero 2", 4)["gradients"] == whole["gradients"] / 4
    assert need("--zero 3", 4)["weights"] == whole["weights"] / 4 == need("--zero 3 --cp 2", 4)["weights"]
    assert need("--zero 1", 4)["weights"] == whole["weights"] == need("--zero 2", 4)["weights"]
    assert need("--zero 1", 4)["gradients"] == whole["gradients"]
    assert need("--zero 2 --zero-offload", 4)["AdamW's states"] == 1.5 * need("--zero 2", 4)["AdamW's states"]
    assert need("--zero 3 --zero-shards 2", 4)["weights"] == whole["weights"] / 2
    wide = "--zero 2 --precision bf16-master"
    assert need(f"{wide} --accumulate-dtype fp32", 4)["gradients"] == 2 * need(wide, 4)["gradients"]
    assert need(wide, 4)["AdamW's states"] == 1.5 * need("--zero 2", 4)["AdamW's states"], "with fp32 masters"
    assert need(f"{wide} --zero-offload", 4) == need(wide, 4), "one master is enough"
    adapted = need("", 4, lora_rank=2)
    new = adapted["weights"] - whole["weights"]
    assert adapted["AdamW's states"] / 2 == adapted["gradients"] == new > 0, "of the adapters alone"
    assert 0.5 < need("--tp 2", 4)["weights"] / whole["weights"] < 0.51  # norms are not cut
    assert need("--pp 2", 4)["weights"] < 0.6 * whole["weights"]
    assert need("--pp 2", 2, layers=3)["weights"] > need("", 2, layers=3)["weights"] / 2, "two layers on a stage"
    assert need("--pp 2 --schedule dualpipe --zero 1", 4)["AdamW's states"] == whole["AdamW's states"] / 4
    assert need("--experts 4 --ep 4", 4)["weights"] < 0.6 * need("--experts 4", 4)["weights"]


@pytest.mark.always("llama3-8b")
@pytest.mark.parametrize("preset", ["llama3-8b", "llama3-70b", "mixtral-8x7b"])
def test_a_model_that_no_rank_can_hold_is_refused_with_the_estimate(preset, text, monkeypatch):
    monkeypatch.setattr(checks, "memory_of_a_rank", lambda device: 16 * 10**9)
    words = ["--preset", preset, "--data", text, "--device", "cpu"]
    said = refusal(words)
    sizes = dataclasses.replace(train.PRESETS[preset], vocab_size=256)
    need = sum(checks.least_bytes(Config(preset=preset), sizes, 1).values()) / 1e9
    assert said.startswith(f"--preset {preset} needs at least {need:,.1f} GB on a rank (weights "), said
    assert "which has 16.0 GB; share it out with --tp, --pp, --ep or --zero on more ranks, or take a smaller" in said
    train.prepare([*words, "--show-mesh"], 1)  # to look at a layout needs no memory
    train.prepare(["--data", text], 1)


def test_the_memory_of_a_rank_is_its_share_of_the_machine(tmp_path, monkeypatch):
    whole = checks.memory_of_a_rank(torch.device("cpu"))
    assert 10**8 < whole <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert checks.memory_of_a_rank(torch.device("cpu")) == whole // 4
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: argparse.Namespace(total_memory=7))
    assert checks.memory_of_a_rank(torch.device("cuda", 0)) == 7, "a GPU is one rank's"
    limit = tmp_path / "memory.max"
    limit.write_text(f"{10**8}\n")
    monkeypatch.setattr(checks, "Path", lambda name: limit)
    assert checks.memory_of_a_rank(torch.device("cpu")) == 10**8 // 4, "a container has less than its machine"


def test_what_is_offloaded_has_to_fit_into_the_machine_and_weights_into_the_gpu(monkeypatch):
    config, gpu = Config(zero=2, zero_offload=True), torch.device("cuda", 0)
    need = checks.least_bytes(config, fuzz.SIZES, 1)
    fits = {"cuda": need["weights"], "cpu": need["gradients"] + need["AdamW's states"]}
    monkeypatch.setattr(checks, "memory_of_a_rank", lambda place: fits[place.type])
    checks.check_memory(config, fuzz.SIZES, 1, gpu)
    for short, line in (("cpu", r"\(gradients "), ("cuda", r"\(weights ")):
        fits[short] -= 1
        with pytest.raises(UsageError, match=f"^--init theirs needs at least .*{line}"):
            checks.check_memory(dataclasses.replace(config, init="theirs"), fuzz.SIZES, 1, gpu)


def test_weights_that_zero_3_would_cut_have_to_fit_before_it_does(text, monkeypatch):
    words = ["--data", text, "--zero", "3", "--precision", "bf16-master", "--global-batch", "64", "--micro-batch", "1"]
    config = Config(**parse(words))
    sizes = dataclasses.replace(train.PRESETS[config.preset], vocab_size=256)
    held, whole = sum(checks.least_bytes(config, sizes, 64).values()), 2 * checks.most_parameters(config, sizes, 64)
    assert held < whole / 4
    monkeypatch.setattr(checks, "memory_of_a_rank", lambda device: int(0.99 * whole))
    said = refusal(words, 64)
    assert "(weights, before ZeRO cuts them " in said, said
    assert said.endswith("; cut it with --tp, --pp or --ep first, or take a smaller model"), said
    monkeypatch.setattr(checks, "memory_of_a_rank", lambda device: int(1.01 * whole))
    train.prepare(words, 64)
