"""What asynchrony buys with the same compute and the same number of samples: time, throughput, busy shares, accuracy.

    python -m experiments.sync_vs_async

Synchronous with static batches (no slot is filled until all are done), synchronous with continuous batching,
asynchronous with max_staleness from --etas; all in the local topology. The conditions take turns, round after round, a
seed a round. Runs lie under --runs; a finished one is not run again.
"""

from __future__ import annotations

from typing import Any

from experiments import interleaved

SYNCHRONOUS: dict[str, dict[str, Any]] = {
    "synchronous, static": {"rollout.max_staleness": 0, "rollout.batching": "static"},
    "synchronous, continuous": {"rollout.max_staleness": 0},
}
COLUMNS = (
    "trained_tokens_per_second",
    "trainer_busy",
    "sampler_busy",
    "slots_useful",
    "staleness_mean",
    "heldout_after",
    "heldout_after_standard_error",
)


def main() -> None:
    cli = interleaved.parser(__doc__, rounds=5)
    cli.add_argument("--etas", type=int, nargs="+", default=[1, 2, 4, 8])
    options = cli.parse_args()
    conditions = SYNCHRONOUS | {f"asynchronous, η = {e}": {"rollout.max_staleness": e} for e in options.etas}
    arguments = ["--etas", *map(str, options.etas)]
    comparison = interleaved.Comparison(options, "sync_vs_async", conditions, COLUMNS, arguments)
    comparison.run("Synchronous against asynchronous", "The local topology.")


if __name__ == "__main__":
    main()
