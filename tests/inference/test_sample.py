import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gatedattn import Transformer, TransformerConfig
from gatedattn.data.tokenizers import Bytes
from gatedattn.inference import sample


@pytest.fixture(scope="module")
def model():
    config = TransformerConfig(vocab_size=257, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=48, init_std=0.3)
    return Transformer(config, rngs=nnx.Rngs(0))


def test_greedy_text_is_what_the_models_own_logits_say(model):
    prompt = jnp.array([[256, 5, 9], [256, 70, 7]])
    out = sample.sample(model, prompt, 12)
    np.testing.assert_array_equal(out[:, :3], prompt)
    logits, _ = model(out)
    np.testing.assert_array_equal(out[:, 3:], logits[:, 2:-1].argmax(-1))


def test_draws_depend_on_the_key_and_follow_the_distribution(model):
    prompt = jnp.tile(jnp.array([[256, 5, 9]]), (2000, 1))
    draws = sample.sample(model, prompt, 4, temperature=2.0, key=jax.random.key(1))[:, 3]
    again = sample.sample(model, prompt, 4, temperature=2.0, key=jax.random.key(1))[:, 3]
    np.testing.assert_array_equal(draws, again)
    expected = jax.nn.softmax(model(prompt[:1])[0][0, -1] / 2.0)
    found = jnp.bincount(draws, length=257) / 2000
    assert 0.5 * jnp.abs(expected - found).sum() < 0.2  # total variation of 2000 draws


def test_text_and_refusals(model):
    assert isinstance(sample.text(model, Bytes(), "Hi", tokens=5), str)
    with pytest.raises(ValueError, match="prompt of 3 tokens"):
        sample.sample(model, jnp.zeros((1, 3), int), 2)
    with pytest.raises(ValueError, match="temperature"):
        sample.sample(model, jnp.zeros((1, 1), int), 2, temperature=1.0)
