import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gatedattn import Transformer, TransformerConfig

TINY = dict(vocab_size=61, d_model=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=24, kernel="reference")


def _build(**changes) -> Transformer:
    """A tiny model with every parameter random; made by NumPy, which compiles nothing."""
    config = TransformerConfig(**TINY | changes)
    graphdef, shapes = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)
    return nnx.merge(graphdef, jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype), shapes))


@pytest.fixture(scope="session")
def build():
    return _build


@pytest.fixture(scope="session")
def model():
    return _build()
