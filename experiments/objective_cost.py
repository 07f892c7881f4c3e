"""What the loss and its diagnostics cost beside the model: CPU time of an update against plain PPO without diagnostics.

    python -m experiments.objective_cost

One core, a Llama-like model of 6M parameters, a packed batch of 32 x 256 tokens. The variants take turns, round after
round; a ratio is that of one round. An update's time includes fetching its sums and making metrics of them. The
forwards before a step are not in it: they are the price of the recomputed proximal policy, not of the loss.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from areal_jax import sharding
from areal_jax.data import packing
from areal_jax.models.transformer import TransformerConfig, build_model
from areal_jax.rl import diagnostics
from areal_jax.rl.losses import LossConfig, resolve
from areal_jax.trainer import train_step
from areal_jax.trainer.optimizer import OptimizerConfig, make_optimizer
from areal_jax.types import Targets, Trajectory
from experiments import common

MODEL = TransformerConfig(vocab_size=4096, layers=4, d_model=256, heads=4, kv_heads=2, head_dim=64, d_ff=1024)
ROWS, LENGTH, VERSION = 32, 256, 8
BASE = "ppo, no diagnostics"
VARIANTS: dict[str, tuple[LossConfig, bool]] = {
    BASE: (LossConfig("ppo"), False),
    "ppo": (LossConfig("ppo"), True),
    "decoupled_ppo": (LossConfig("decoupled_ppo"), True),
    "decoupled_ppo, all switches": (
        LossConfig(
            "decoupled_ppo", aggregation="seq_mean_token_mean", dual_clip=3.0, importance_weight="mask",
            importance_level="sequence", opsm_threshold=0.1, kl_coefficient=0.01, proximal="loglinear",
            proximal_check=True,
        ),
        True,
    ),
    "gspo": (LossConfig("gspo"), True),
    "m2po (with its forward)": (LossConfig("m2po"), True),
}  # fmt: skip


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--output", type=pathlib.Path, default=common.RESULTS / "objective_cost")
    cli.add_argument("--rounds", type=int, default=7)
    options = cli.parse_args()
    updates = {name: make_update(*variant) for name, variant in VARIANTS.items()}
    for update in updates.values():
        update()
    rows = []
    for i in range(options.rounds):
        for name, update in updates.items():
            began = time.process_time()
            update()
            rows.append({"round": i, "variant": name, "cpu_seconds": time.process_time() - began})
            print(rows[-1], flush=True)
    common.write_csv(options.output / "runs.csv", rows)
    report(options.output, rows)


def make_update(config: LossConfig, with_diagnostics: bool) -> Callable[[], Any]:
    """One update of a policy that stays where it is (learning rate 0), with its metrics."""
    mesh = sharding.make_mesh({"data": 1, "fsdp": 1, "tensor": 1}, jax.devices()[:1])
    model, optimizer = build_model(MODEL, mesh), make_optimizer(OptimizerConfig())
    step = train_step.StepConfig(resolve(config), diagnostics=with_diagnostics)
    batch, targets = example(step)
    programs = train_step.compile_programs(model, optimizer, step, batch)
    state = train_step.init_state(model.init_params(0), model, optimizer)
    placed, targets = train_step.place(batch, model), train_step.place_targets(targets, model)
    version, rate = train_step.scalar(VERSION, np.int32, model), train_step.scalar(0.0, np.float32, model)

    def update() -> dict[str, float]:
        nonlocal state
        state, sums = programs.update(state, placed, targets, version, train_step.Rates(rate, rate))
        host = jax.device_get(sums)
        return diagnostics.finalize(host, step.loss) if with_diagnostics else {"loss": float(host["objective"])}

    return update


def example(step: train_step.StepConfig) -> tuple[Any, Targets]:
    """Sequences of 32 to 256 tokens that fill the rows, drawn by versions 0 to 8."""
    rng = np.random.default_rng(0)
    samples: list[Trajectory] = []
    while len(packing.assign_rows([len(t.tokens) for t in samples], LENGTH)) <= ROWS:
        n = int(rng.integers(32, LENGTH + 1))
        drawn = np.arange(n) >= 16
        samples.append(
            Trajectory(
                sample_id=len(samples),
                prompt_id=len(samples) // 8,
                tokens=rng.integers(0, MODEL.vocab_size, n).astype(np.int32),
                behaviour_logprobs=np.where(drawn, -8.3 + 0.2 * rng.standard_normal(n), 0).astype(np.float32),
                policy_versions=np.where(drawn, np.sort(rng.integers(0, VERSION + 1, n)), -1).astype(np.int32),
                loss_mask=drawn.astype(np.float32),
                finish_reason="stop",
                reward=0.0,
            )
        )
    batch, layout = packing.pack(samples[:-1], packing.PackingConfig(LENGTH, ROWS, LENGTH), 1)
    spread = layout.spread([t.behaviour_logprobs for t in samples[:-1]])
    advantages = layout.spread([np.full(len(t.tokens), rng.standard_normal()) * t.loss_mask for t in samples[:-1]])
    needed = train_step.corrections.needs_proximal_forward(step.loss)
    return batch, Targets(advantages, spread if needed else None, spread if step.loss.kl_coefficient else None)


def report(directory: pathlib.Path, rows: list[dict[str, Any]]) -> None:
    base = [r["cpu_seconds"] for r in rows if r["variant"] == BASE]
    table = []
    for name in VARIANTS:
        mine = [r["cpu_seconds"] for r in rows if r["variant"] == name]
        ratios = [a / b for a, b in zip(mine, base, strict=True)]
        low, high = common.bootstrap_interval(ratios)
        table.append(
            {
                "variant": name,
                "median CPU seconds": statistics.median(mine),
                "median ratio": statistics.median(ratios),
                "95 % interval of the mean ratio": f"{low:.3f} to {high:.3f}",
            }
        )
    body = (
        f"{len(base)} interleaved rounds on one core; {ROWS} rows of {LENGTH} tokens; the 6M-parameter shape "
        f"({MODEL.layers} layers of {MODEL.d_model}). Ratios are to '{BASE}' in the same round.\n\n"
        + common.markdown_table(table)
    )
    common.write_report(directory, "Cost of the loss and its diagnostics", "python -m experiments.objective_cost", body)


if __name__ == "__main__":
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    main()
