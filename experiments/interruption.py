"""What it is worth that new weights reach samples in the middle: kv_on_update finish, recompute and keep.

    python -m experiments.interruption

With `finish` a sampler lets all its samples end before it takes new weights: generation that is not interruptible,
the baseline of the ablation in AReaL (arXiv 2505.24298), which reports 12 % more generation throughput with
interruption for a 1.5B model and 17 % for a 7B one. With `recompute` and `keep` the weights are swapped between two
chunks, and the keys and values of live samples are computed anew or left as they are. The conditions take turns, a
seed a round. Runs lie under --runs; a finished one is not run again.
"""

from __future__ import annotations

from experiments import interleaved

CONDITIONS = {mode: {"rollout.kv_on_update": mode} for mode in ("finish", "recompute", "keep")}
COLUMNS = (
    "generated_tokens_per_second",
    "slots_useful",
    "sampler_busy",
    "trainer_busy",
    "swap_pause_seconds_mean",
    "staleness_mean",
    "staleness_max",
    "heldout_after",
    "heldout_after_standard_error",
)


def main() -> None:
    options = interleaved.parser(__doc__, rounds=3).parse_args()
    interleaved.Comparison(options, "interruption", CONDITIONS, COLUMNS).run(
        "Interruptible generation",
        "`rollout.kv_on_update`: finish all samples before new weights are taken, or swap between two chunks and "
        "either recompute or keep the keys and values of live samples. AReaL reports 12 % (1.5B) and 17 % (7B) more "
        "generation throughput with interruption. A pause is that of decoding at a swap; what `finish` costs is in the "
        "share of slots that are useful instead.",
    )


if __name__ == "__main__":
    main()
