"""The benchmarks run on small shapes and count what they say they count; how fast they are is no test's business."""

import json
import subprocess
import sys

import pytest

from tests.helpers import ROOT, environment

SMALL = ["--config=pico", "--prompt=8", "--reps=1"]


def record(*arguments):
    command = [sys.executable, "-m", "experiments.benchmark", *arguments, *SMALL]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_generate_counts_useful_tokens_and_rows():
    r = record("generate", "--batch=4", "--new=16", "--requests=6")
    assert r["mean_len"] == 16
    assert 6 * 16 / (8 * 16) <= r["slots_useful"] <= 1
    assert r["tokens"] == 6 * 16


def test_train_counts_all_tokens_of_the_rows():
    r = record("train", "--batch=4", "--new=24", "--micro-batch-rows=2")
    assert r["tokens"] == 4 * 32


def test_packing_computes_the_same_samples_with_less_padding():
    r = record("packing", "--new=120", "--requests=24", "--micro-batch-rows=2")
    assert r["padded_efficiency"] < r["by_number_efficiency"] < r["packed_efficiency"] <= 1
    assert r["longest"] <= 128
    assert r["mean_len"] / 128 == pytest.approx(r["padded_efficiency"], rel=1e-2)


def test_memory_is_less_with_rematerialisation_in_a_loop_and_logits_by_chunks():
    found = record("memory", "--new=1016")["found"]
    peak = {name: sizes["peak_mib"] for name, sizes in found.items()}
    assert peak["scanned, remat full, logits chunks"] < peak["unrolled, remat none, logits chunks"]
    assert peak["unrolled, remat none, logits chunks"] < peak["unrolled, remat none, logits whole"]
