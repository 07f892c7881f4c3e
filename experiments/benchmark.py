"""Speed of the parts on one machine, to be compared with other programs on the same shapes.

    python -m experiments.benchmark generate
    python -m experiments.benchmark generate --n-eos 64 --requests 128    # lengths with a long tail
    python -m experiments.benchmark train
    python -m experiments.benchmark packing                  # long-tailed lengths: padded, by number, by token budget
    python -m experiments.benchmark attention                # kernels that run here, forward and backward
    python -m experiments.benchmark decode_attention         # and those of decoding
    python -m experiments.benchmark memory                   # of an update of the 135M shape on 8,192 tokens
    python -m experiments.benchmark cache                    # paged against dense, up to 8,192 tokens a sample
    python -m experiments.benchmark endurance                # compiles and memory over 20,000 requests

Models are Llama-like with random weights, prompts random tokens, everything float32 on a CPU. With --n-eos k the
tokens 1 to k end a response, which for an untrained model makes its length about geometric with mean vocabulary / k.
A rate counts useful tokens alone: no end of sequence, nothing after it. `cpu_s` is user and system time of the
process, the figure to compare on a shared machine; use one core where the others do (`taskset -c 1`,
XLA_FLAGS=--xla_cpu_multi_thread_eigen=false). The last line is the record, as JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from areal_jax import sharding
from areal_jax.compiles import CompileCounter
from areal_jax.data import packing
from areal_jax.models.decode_kernels import DECODE_KERNELS, decode_dense, decode_paged
from areal_jax.models.kernels import KERNELS, Packed, attend_packed
from areal_jax.models.linear import PROJECTIONS, LoraConfig
from areal_jax.models.transformer import REMAT, Model, TransformerConfig, build_model
from areal_jax.rl.losses import LossConfig, resolve
from areal_jax.rollout.blocks import Paging
from areal_jax.rollout.engine import Completion, Engine
from areal_jax.rollout.programs import EngineConfig, make_program
from areal_jax.rollout.schedule import Request
from areal_jax.trainer import train_step
from areal_jax.trainer.optimizer import OptimizerConfig, make_optimizer
from areal_jax.types import PROMPT_VERSION, PolicySnapshot, Targets, Trajectory

LLAMA = TransformerConfig(
    vocab_size=4096, layers=4, d_model=256, heads=4, kv_heads=2, head_dim=64, d_ff=1024, norm_eps=1e-5
)
MODELS = {
    "pico": dataclasses.replace(LLAMA, layers=2, d_model=64, kv_heads=1, head_dim=32, d_ff=128),  # 0.6M parameters
    "tiny": LLAMA,  # 6.0M
    "small": dataclasses.replace(LLAMA, layers=6, d_model=384, heads=6, d_ff=1536),  # 16M
    "smol135": dataclasses.replace(  # SmolLM2-135M's shape
        LLAMA, vocab_size=49152, layers=30, d_model=576, heads=9, kv_heads=3, d_ff=1536, tied_embeddings=True
    ),
}


def generate(options: argparse.Namespace) -> dict[str, Any]:
    """Serves the requests --reps times, after a first time that compiles."""
    model = make_model(options)
    engine = make_engine(model, options)
    requests = random_requests(options, model.config.vocab_size)
    serve(engine, requests)
    steps, drawn = engine.decoded_slot_steps, engine.generated_tokens
    walls, cpus, tokens = zip(*(timed(engine, requests) for _ in range(options.reps)), strict=True)
    return {
        "name": "areal_jax_generate",
        **times(walls, cpus, tokens),
        "slots_useful": round((engine.generated_tokens - drawn) / (engine.decoded_slot_steps - steps), 3),
        "mean_len": round(statistics.fmean(tokens) / len(requests), 1),
        "preemptions": engine.preemptions,
        "params": model.parameter_count(),
        **workload(options),
    }


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Training steps of PPO without diagnostics: --batch rows of --prompt + --new tokens each, one update a step."""
    model, optimizer = make_model(options), make_optimizer(OptimizerConfig())
    length = options.prompt + options.new
    samples = random_samples(options.batch, options.prompt, length, model.config.vocab_size)
    shape = packing.PackingConfig(length, min(options.batch, options.micro_batch_rows), length)
    batch, layout = packing.pack(samples, shape, shape.max_micro_batches(len(samples)))
    advantages = layout.spread([np.full(length, t.reward) * t.loss_mask for t in samples])
    step = train_step.StepConfig(resolve(LossConfig("ppo")), diagnostics=False, logprob_chunk=options.logprob_chunk)
    programs = train_step.compile_programs(model, optimizer, step, batch)
    state = train_step.init_state(model.init_params(0), model, optimizer)
    targets = train_step.place_targets(Targets(advantages), model)
    version, rate = train_step.scalar(1, np.int32, model), train_step.scalar(1e-5, np.float32, model)
    walls, cpus = [], []
    for i in range(options.reps + 2):
        wall, cpu = time.perf_counter(), time.process_time()
        placed = train_step.place(batch, model)
        state, sums = programs.update(state, placed, targets, version, train_step.Rates(rate, rate))
        jax.block_until_ready((state, sums))
        if i >= 2:
            walls.append(time.perf_counter() - wall)
            cpus.append(time.process_time() - cpu)
    return {
        "name": "areal_jax_train",
        **times(walls, cpus, [options.batch * length] * options.reps),
        "params": model.parameter_count(),
        "trained_params": sum(x.size for x in jax.tree.leaves(state.params)),
        "micro_batch_rows": shape.rows,
        **workload(options),
    }


def packing_ways(options: argparse.Namespace) -> dict[str, Any]:
    """Gradients of samples whose lengths have a long tail (lognormal, mean a quarter of the most), in four ways that
    take turns: a row of the most tokens for each (padded); as many samples a micro-batch, in rows as long as its
    longest needs, of lengths that halve (by number); rows packed by token budget; and these, cut where samples are
    short."""
    model, most = make_model(options), options.prompt + options.new
    samples = long_tailed_samples(options.requests, options.prompt, most, model.config.vocab_size)
    shape = packing.PackingConfig(most, options.micro_batch_rows, most)
    ways = {
        "padded": [Part(shape, samples, a_row_each(samples, shape))],
        "by_number": by_number(samples, shape, options.halvings),
        "packed": [packed(samples, shape)],
        "packed_cut": [packed(samples, dataclasses.replace(shape, halvings=options.halvings))],
    }
    gradients = {name: Gradients(model, parts, options.logprob_chunk) for name, parts in ways.items()}
    tokens = sum(len(t.tokens) for t in samples)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.reps):
        for name, gradient in gradients.items():
            rates[name].append(tokens / gradient.cpu_seconds())
            print(f"{name}: {rates[name][-1]:.0f} real tokens per CPU second", flush=True)
    return {
        "name": "areal_jax_packing",
        **{f"{name}_tokens_per_cpu_second": round(statistics.median(r), 1) for name, r in rates.items()},
        **{f"{name}_efficiency": round(gradient.efficiency, 3) for name, gradient in gradients.items()},
        "packed_cut_over": {
            n: round(statistics.median(c / o for c, o in zip(rates["packed_cut"], rates[n], strict=True)), 2)
            for n in ("padded", "by_number", "packed")
        },
        "mean_len": round(tokens / len(samples), 1),
        "longest": max(len(t.tokens) for t in samples),
        "halvings": options.halvings,
        "micro_batch_rows": shape.rows,
        "reps": options.reps,
        **workload(options),
    }


def memory(options: argparse.Namespace) -> dict[str, Any]:
    """What XLA reserves for an update of one row of --prompt + --new tokens, by rematerialisation and with the logits
    of the whole row at once or of a chunk; compiles and runs nothing."""
    length, found = options.prompt + options.new, {}
    batch, _ = packing.pack([], packing.PackingConfig(length, 1, length), 1)
    ways = [("none", False), *((remat, True) for remat in REMAT)]
    for remat, scan in ways:
        for logits, chunk in (("whole", length), ("chunks", options.logprob_chunk)):
            model = make_model(options, remat=remat, scan_layers=scan)
            name = f"{'scanned' if scan else 'unrolled'}, remat {remat}, logits {logits}"
            step = train_step.StepConfig(resolve(LossConfig("ppo")), diagnostics=False, logprob_chunk=chunk)
            programs = train_step.compile_programs(model, make_optimizer(OptimizerConfig()), step, batch)
            sizes = programs.executable.memory_analysis()
            state = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
            found[name] = {
                "peak_mib": round((state + sizes.temp_size_in_bytes) / 2**20, 1),
                "beside_the_state_mib": round(sizes.temp_size_in_bytes / 2**20, 1),
            }
            print(f"{name}: {found[name]}", flush=True)
    return {"name": "areal_jax_memory", "found": found, "params": model.parameter_count(), **workload(options)}


class Part(NamedTuple):
    """Samples of micro-batches of one shape."""

    shape: packing.PackingConfig
    samples: list[Trajectory]
    assigned: list[packing.MicroBatch]


def packed(samples: list[Trajectory], shape: packing.PackingConfig) -> Part:
    return Part(shape, samples, packing.assign_micro_batches([len(t.tokens) for t in samples], shape))


def a_row_each(samples: list[Trajectory], shape: packing.PackingConfig) -> list[packing.MicroBatch]:
    """shape.rows samples a micro-batch, as they come."""
    rows = [[i] for i in range(len(samples))]
    return [packing.MicroBatch(0, rows[i : i + shape.rows]) for i in range(0, len(rows), shape.rows)]


def by_number(samples: list[Trajectory], shape: packing.PackingConfig, halvings: int) -> list[Part]:
    """shape.rows samples a micro-batch, as they come, in rows of the shortest length that holds the longest."""
    by_length: dict[int, list[Trajectory]] = {}
    for i in range(0, len(samples), shape.rows):
        some = samples[i : i + shape.rows]
        longest = max(len(t.tokens) for t in some)
        length = min(n for n in (shape.row_length >> h for h in range(halvings + 1)) if n >= longest)
        by_length.setdefault(length, []).extend(some)
    shapes = {length: packing.PackingConfig(length, shape.rows, length) for length in by_length}
    return [Part(shapes[n], some, a_row_each(some, shapes[n])) for n, some in by_length.items()]


class Gradients:
    """The gradient of all parts, a program for each, with an optimizer that takes no time."""

    def __init__(self, model: Model, parts: Sequence[Part], logprob_chunk: int):
        self._model, self._batches, self._updates = model, [], []
        optimizer = optax.scale(-1.0)
        for part in parts:
            batch, layout = packing.lay_out(part.samples, part.assigned, part.shape, len(part.assigned))
            self._batches.append((batch, Targets(layout.spread([t.reward * t.loss_mask for t in part.samples]))))
            loss, halvings = resolve(LossConfig("ppo")), part.shape.halvings
            step = train_step.StepConfig(loss, diagnostics=False, logprob_chunk=logprob_chunk, halvings=halvings)
            self._updates.append(train_step.compile_programs(model, optimizer, step, batch).update)
        self._state = train_step.init_state(model.init_params(0), model, optimizer)
        self.efficiency = packing.efficiency([batch for batch, _ in self._batches])
        self.cpu_seconds()

    def cpu_seconds(self) -> float:
        version, rate = train_step.scalar(1, np.int32, self._model), train_step.scalar(1e-5, np.float32, self._model)
        began = time.process_time()
        for update, (batch, targets) in zip(self._updates, self._batches, strict=True):
            placed = train_step.place(batch, self._model), train_step.place_targets(targets, self._model)
            self._state, _ = update(self._state, *placed, version, train_step.Rates(rate, rate))
        jax.block_until_ready(self._state)
        return time.process_time() - began


def attention(options: argparse.Namespace) -> dict[str, Any]:
    """Attention of --batch packed rows of --prompt + --new tokens, four segments in each, forward and backward, by
    every kernel that runs on this platform; they take turns. In float32 on a CPU, else in bfloat16."""
    c, rows, length = MODELS[options.config], options.batch, options.prompt + options.new
    platform = jax.default_backend()
    dtype = "float32" if platform == "cpu" else "bfloat16"
    keys = jax.random.split(jax.random.key(0), 4)
    q = jax.random.normal(keys[0], (rows, length, c.heads, c.head_dim), dtype)
    k, v = (jax.random.normal(key, (rows, c.kv_heads, length, c.head_dim), dtype) for key in keys[1:3])
    segments = jnp.sort(jax.random.randint(keys[3], (rows, length), 0, 4))
    mask = jnp.tril(jnp.ones((length, length), bool)) & (segments[:, :, None] == segments[:, None])
    packed = Packed(mask, segments, 0)

    def both(name: str) -> Any:
        def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return jnp.sum(jnp.square(attend_packed(name, q, k, v, packed, c.head_dim**-0.5, None).astype(jnp.float32)))

        return jax.jit(jax.grad(loss, (0, 1, 2)))

    functions = {n: both(n) for n in ("xla", *(n for n, kernel in KERNELS.items() if platform in kernel.platforms))}
    found = compared(functions, (q, k, v), options.reps)
    return {"name": "areal_jax_attention", **found, "platform": platform, "dtype": dtype, **workload(options)}


def decode_attention(options: argparse.Namespace) -> dict[str, Any]:
    """Attention of one token in each of --batch rows with --prompt to --prompt + --new keys, by every kernel that runs
    on this platform, over a dense and a paged cache; they take turns. In float32 on a CPU, else in bfloat16."""
    c, rows, length = MODELS[options.config], options.batch, options.prompt + options.new
    platform, blocks = jax.default_backend(), options.batch * -(-length // options.block)
    dtype = "float32" if platform == "cpu" else "bfloat16"
    keys = jax.random.split(jax.random.key(0), 5)
    q = jax.random.normal(keys[0], (rows, c.heads, c.head_dim), dtype)
    dense = [jax.random.normal(k, (rows, c.kv_heads, length, c.head_dim), dtype) for k in keys[1:3]]
    pool = [jax.random.normal(k, (blocks, c.kv_heads, options.block, c.head_dim), dtype) for k in keys[1:3]]
    tables = jax.random.permutation(keys[3], blocks).reshape(rows, -1)
    positions = jax.random.randint(keys[4], (rows,), options.prompt, length)
    names = ("xla", *(n for n, kernel in DECODE_KERNELS.items() if platform in kernel.platforms))
    over_dense = {n: jax.jit(functools.partial(decode_dense, n, window=0, scale=0.1, mesh=None)) for n in names}
    over_paged = {n: jax.jit(functools.partial(decode_paged, n, window=0, scale=0.1, mesh=None)) for n in names}
    return {
        "name": "areal_jax_decode_attention",
        "dense": compared(over_dense, (q, *dense, positions), options.reps),
        "paged": compared(over_paged, (q, *pool, tables, positions), options.reps),
        "platform": platform,
        "dtype": dtype,
        **workload(options),
    }


def compared(functions: Mapping[str, Callable[..., Any]], arguments: Sequence[Any], reps: int) -> dict[str, Any]:
    """Milliseconds of the functions, which take turns, and by how much the arrays that they return differ, at most,
    from those of 'xla', as a share of the largest entry."""
    plain, away, refused = jax.tree.leaves(jax.device_get(functions["xla"](*arguments))), {}, {}
    for name, function in functions.items():
        try:
            found = jax.tree.leaves(jax.device_get(function(*arguments)))
        except Exception as error:  # a kernel may not have this shape or card: that is a result too
            refused[name] = f"{type(error).__name__}: {error}"[:200]
            continue
        pairs = [(np.asarray(x, np.float32), np.asarray(y, np.float32)) for x, y in zip(found, plain, strict=True)]
        away[name] = max(float(np.abs(x - y).max() / np.abs(y).max()) for x, y in pairs)
    seconds: dict[str, list[float]] = {name: [] for name in away}
    for _ in range(reps):
        for name in away:
            began = time.perf_counter()
            jax.block_until_ready(functions[name](*arguments))
            seconds[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(s) for name, s in seconds.items()}
    return {
        "milliseconds": {name: round(1e3 * s, 3) for name, s in medians.items()},
        "times_as_fast_as_xla": {name: round(medians["xla"] / s, 3) for name, s in medians.items()},
        "largest_difference": {name: float(f"{x:.2g}") for name, x in away.items()},
        "refused": refused,
    }


def cache(options: argparse.Namespace) -> dict[str, Any]:
    """Serves the same requests with a dense cache and with a paged one of --cache-share, the two taking turns."""
    model = make_model(options)
    if not options.cache_share:
        raise SystemExit("--cache-share=0: a share of the dense cache is needed for the paged one")
    requests = random_requests(options, model.config.vocab_size)
    engines: dict[str, Engine] = {}
    for name, share in (("dense", 0.0), ("paged", options.cache_share)):
        engines[name] = make_engine(model, argparse.Namespace(**vars(options) | {"cache_share": share}))
        engines[name].warm_up()
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(options.reps):
        for name, engine in engines.items():
            _, cpu, tokens = timed(engine, requests)
            rates[name].append(tokens / cpu)
            print(f"{name}: {rates[name][-1]:.0f} useful tokens per CPU second", flush=True)
    token = 2 * model.config.layers * model.config.kv_heads * model.config.head_dim * 4  # bytes
    paging = engines["paged"].config.paging
    assert paging is not None
    return {
        "name": "areal_jax_cache",
        **{f"{name}_tokens_per_cpu_second": round(statistics.median(rates[name]), 1) for name in rates},
        "paged_is_as_fast": [round(p / d, 3) for p, d in zip(rates["paged"], rates["dense"], strict=True)],
        "dense_mib": round(token * options.batch * (options.prompt + options.new) / 2**20, 1),
        "paged_mib": round(token * paging.blocks * paging.block_size / 2**20, 1),
        "preemptions": engines["paged"].preemptions,
        "slots_useful": {n: round(e.generated_tokens / e.decoded_slot_steps, 3) for n, e in engines.items()},
        "reps": options.reps,
        **workload(options),
    }


def endurance(options: argparse.Namespace) -> dict[str, Any]:
    """Serves many random requests, a tenth at a time, with a swap of weights in the middle of each."""
    model = make_model(options)
    compiles = CompileCounter()
    engine = make_engine(model, options)
    engine.warm_up()
    requests = random_requests(options, model.config.vocab_size)
    weights = [engine.snapshot.params, model.init_params(1)]
    compiles.warm()
    part, memory = -(-len(requests) // 10), []
    for i in range(0, len(requests), part):
        engine.submit(requests[i : i + part])
        engine.step()
        engine.set_params(PolicySnapshot(i // part, weights[i // part % 2]))
        serve(engine, [])
        memory.append(resident_mib())
        print(f"{min(i + part, len(requests))} requests, resident {memory[-1]:.1f} MiB", flush=True)
    return {
        "name": "areal_jax_endurance",
        "compiles_after_warmup": compiles.after_warmup,
        "resident_mib_after_a_tenth": round(memory[0], 1),
        "resident_mib_at_the_end": round(memory[-1], 1),
        "resident_mib_peak": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        **workload(options),
    }


KINDS: dict[str, tuple[Callable[[argparse.Namespace], dict[str, Any]], dict[str, Any]]] = {
    "generate": (generate, {}),
    "train": (train, {}),
    "packing": (packing_ways, {"new": 960, "requests": 64, "halvings": 2, "micro_batch_rows": 2, "reps": 3}),
    "attention": (attention, {"batch": 4, "new": 960}),
    "decode_attention": (decode_attention, {"batch": 64, "new": 1984}),
    "memory": (memory, {"config": "smol135", "new": 8128}),
    "cache": (
        cache,
        {"config": "pico", "batch": 16, "new": 8128, "n_eos": 2, "requests": 48, "cache_share": 0.4, "reps": 3},
    ),
    "endurance": (endurance, {"n_eos": 64, "requests": 20_000}),
}
"""name -> (what runs it, its defaults where they are not those of `generate`)."""


def times(walls: Sequence[float], cpus: Sequence[float], tokens: Sequence[int]) -> dict[str, Any]:
    """Of repetitions that took so many seconds for so many useful tokens."""
    return {
        "median_s": round(statistics.median(walls), 4),
        "min_s": round(min(walls), 4),
        "max_s": round(max(walls), 4),
        "median_rate": round(statistics.median(n / wall for n, wall in zip(tokens, walls, strict=True)), 1),
        "unit": "tok/s",
        "tokens": statistics.median(tokens),
        "reps": len(walls),
        "cpu_s": round(statistics.median(cpus), 3),
        "cpu_min": round(min(cpus), 3),
        "tokens_per_cpu_second": round(statistics.median(n / cpu for n, cpu in zip(tokens, cpus, strict=True)), 1),
    }


def workload(options: argparse.Namespace) -> dict[str, Any]:
    """What the figures are of."""
    names = ("config", "batch", "prompt", "new", "n_eos", "requests", "chunk", "cache_share", "block", "lora_rank")
    return {name: getattr(options, name) for name in names}


def make_model(options: argparse.Namespace, **changes: Any) -> Model:
    lora = LoraConfig(options.lora_rank, 32.0, tuple(PROJECTIONS)) if options.lora_rank else None
    config = dataclasses.replace(MODELS[options.config], lora=lora, **changes)
    return build_model(config, sharding.make_mesh({"data": -1, "fsdp": 1, "tensor": 1}))


def make_engine(model: Model, options: argparse.Namespace) -> Engine:
    slots, longest = options.batch, options.prompt + options.new
    blocks = int(options.cache_share * slots * longest // options.block)
    if options.cache_share and blocks * options.block < longest + options.block:
        raise SystemExit(f"--cache-share={options.cache_share} is less than one sequence of {longest} tokens")
    config = EngineConfig(
        slots=slots,
        max_prompt_length=options.prompt,
        max_length=longest,
        chunk=options.chunk,
        row_ladder=tuple(sorted({1, *(max(1, slots // n) for n in (32, 8, 2))})),
        length_ladder=tuple(
            sorted({3 * options.prompt // 4, *(max(options.prompt, longest // n) for n in (longest, 4, 2, 1))})
        ),
        prefill_tokens=max(longest, slots // 2 * options.prompt),
        eos_ids=tuple(range(1, options.n_eos + 1)),
        kv_on_update="recompute",
        fewer=tuple(sorted({slots // n for n in (4, 2) if slots // n})),
        paging=Paging(blocks, options.block) if blocks else None,
    )
    return Engine(make_program(model, config), PolicySnapshot(0, model.init_params(0)), seed=0)


def random_requests(options: argparse.Namespace, vocabulary: int) -> list[Request]:
    """At least one a slot, of tokens from the upper half of the vocabulary; the first prompt is a longest one."""
    rng = np.random.default_rng(0)

    def tokens(length: int) -> np.ndarray:
        return rng.integers(vocabulary // 2, vocabulary, size=length).astype(np.int32)

    count = max(options.requests, options.batch)
    prompts = [tokens(int(rng.integers(max(1, options.prompt // 2), options.prompt + 1))) for _ in range(count)]
    prompts[0] = tokens(options.prompt)
    return [Request(i, prompt, options.new, 1.0) for i, prompt in enumerate(prompts)]


def random_samples(count: int, prompt: int, length: int, vocabulary: int) -> list[Trajectory]:
    """Samples of `length` random tokens drawn by version 0, uniformly; the first `prompt` ones are the prompt."""
    rng = np.random.default_rng(0)
    drawn = np.arange(length) >= prompt
    return [
        Trajectory(
            sample_id=i,
            prompt_id=i,
            tokens=rng.integers(1, vocabulary, length).astype(np.int32),
            behaviour_logprobs=np.where(drawn, -np.log(vocabulary), 0).astype(np.float32),
            policy_versions=np.where(drawn, 0, PROMPT_VERSION).astype(np.int32),
            loss_mask=drawn.astype(np.float32),
            finish_reason="length",
            reward=float(rng.standard_normal()),
        )
        for i in range(count)
    ]


def long_tailed_samples(count: int, prompt: int, most: int, vocabulary: int) -> list[Trajectory]:
    """As `random_samples`, of lognormal lengths with a mean of about a quarter of `most` and sigma 0.8, at most `most`;
    of each an eighth, and at most `prompt` tokens, is the prompt."""
    rng = np.random.default_rng(1)
    lengths = np.clip(rng.lognormal(np.log(most / 4) - 0.8**2 / 2, 0.8, count), 16, most).astype(int)
    samples = random_samples(count, prompt, most, vocabulary)
    return [cut_short(t, int(n), min(prompt, int(n) // 8)) for t, n in zip(samples, lengths, strict=True)]


def cut_short(sample: Trajectory, length: int, prompt: int) -> Trajectory:
    drawn = np.arange(length) >= prompt
    return dataclasses.replace(
        sample,
        tokens=sample.tokens[:length],
        behaviour_logprobs=np.where(drawn, sample.behaviour_logprobs[-1], 0).astype(np.float32),
        policy_versions=np.where(drawn, 0, PROMPT_VERSION).astype(np.int32),
        loss_mask=drawn.astype(np.float32),
    )


def timed(engine: Engine, requests: list[Request]) -> tuple[float, float, int]:
    """Wall and CPU seconds for serving the requests, and how many useful tokens that gave."""
    wall, cpu = time.perf_counter(), time.process_time()
    completions = serve(engine, requests)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    eos = set(engine.config.eos_ids)
    return wall, cpu, sum(len(c.tokens) - len(c.request.prompt) - (int(c.tokens[-1]) in eos) for c in completions)


def serve(engine: Engine, requests: list[Request]) -> list[Completion]:
    engine.submit(requests)
    done: list[Completion] = []
    while engine.unfinished:
        done += engine.step()
    return done


def resident_mib() -> float:
    """Of this process, now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = cli.add_subparsers(dest="kind", required=True)
    for name, (run, defaults) in KINDS.items():
        kind = kinds.add_parser(name, description=run.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        kind.add_argument("--config", default="tiny", choices=list(MODELS), help="the model's shape")
        kind.add_argument("--lora-rank", type=int, default=0, help="of adapters on all projections; 0: none")
        kind.add_argument("--batch", type=int, default=32, help="slots")
        kind.add_argument("--prompt", type=int, default=64, help="longest prompt; the shortest has half of it")
        kind.add_argument("--new", type=int, default=192, help="most tokens of a response")
        kind.add_argument("--n-eos", type=int, default=0, help="tokens that end a response; 0: nothing ends early")
        kind.add_argument("--requests", type=int, default=0, help="at least one a slot")
        kind.add_argument("--chunk", type=int, default=16, help="most decode steps between two visits of the host")
        kind.add_argument("--micro-batch-rows", type=int, default=8, help="train: rows that are computed at once")
        kind.add_argument("--halvings", type=int, default=0, help="packing: how often rows may be cut in half")
        kind.add_argument("--logprob-chunk", type=int, default=0, help="train: tokens whose logits exist at once")
        kind.add_argument("--reps", type=int, default=5)
        kind.add_argument("--cache-share", type=float, default=0.0, help="of a dense cache: paged; 0 is dense")
        kind.add_argument("--block", type=int, default=128, help="tokens of a block of a paged cache")
        kind.add_argument("--json", default="", help="a file that the record is appended to")
        kind.set_defaults(run=run, **defaults)
    options = cli.parse_args()
    line = json.dumps(options.run(options) | {"jax": jax.__version__})
    print(line, flush=True)
    if options.json:
        with open(options.json, "a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
