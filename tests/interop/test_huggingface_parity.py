"""Against transformers itself: the same random weights, the same random ids, the same logits. Runs where torch is installed."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.hf

from safetensors.torch import save_file  # noqa: E402
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, apply_rotary_pos_emb  # noqa: E402

from gatedattn import TransformerConfig  # noqa: E402
from gatedattn.config import MoEConfig, RopeConfig  # noqa: E402
from gatedattn.interop import huggingface  # noqa: E402
from gatedattn.interop.build import build  # noqa: E402
from gatedattn.kernels.reference import probabilities  # noqa: E402
from gatedattn.transformer import abstract_parameters  # noqa: E402

VOCAB, T = 101, 24
SMALL = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, max_position_embeddings=64, pad_token_id=None,
    bos_token_id=0, eos_token_id=1,
)  # fmt: skip
EXPERTS = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16)
NEXT = dict(layer_types=["full_attention"] * 2)
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}


def heads(n, k, h=8):
    return dict(num_attention_heads=n, num_key_value_heads=k, head_dim=h)


STOCK = {
    "llama-mha": ("llama", heads(4, 4)),
    "llama-mqa-tied-bias": ("llama", heads(4, 1) | dict(attention_bias=True, tie_word_embeddings=True)),
    "llama-yarn": ("llama", heads(4, 2) | dict(rope_parameters=YARN)),
    "llama-yarn-temperature": ("llama", heads(4, 2) | dict(rope_parameters=YARN | {"attention_factor": 1.3, "beta_fast": 8.0})),
    "llama-linear": ("llama", heads(4, 2) | dict(rope_parameters={"rope_type": "linear", "rope_theta": 5e3, "factor": 3.0})),
    "mistral-window": ("mistral", heads(4, 2) | dict(sliding_window=5)),
    "mistral": ("mistral", heads(4, 2) | dict(sliding_window=None)),
    "qwen2": ("qwen2", heads(4, 2)),
    "qwen3-gqa": ("qwen3", heads(4, 2)),
    "qwen3-mqa-tied": (
        "qwen3", heads(6, 1, 16) | dict(tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    ),
    "qwen3-window-bias": (
        "qwen3", heads(4, 2) | dict(use_sliding_window=True, sliding_window=4, max_window_layers=0, attention_bias=True)
    ),
    "qwen3_moe": ("qwen3_moe", heads(4, 2) | EXPERTS),
    "qwen3_moe-renormalized": ("qwen3_moe", heads(4, 4) | EXPERTS | dict(norm_topk_prob=True, tie_word_embeddings=True)),
    "qwen3_next-dense": ("qwen3_next", heads(4, 2) | NEXT | dict(num_experts=0)),
    "qwen3_next-dense-bias": ("qwen3_next", heads(4, 1, 16) | NEXT | dict(mlp_only_layers=[0, 1], attention_bias=True)),
    "qwen3_next-moe": ("qwen3_next", heads(4, 2, 16) | NEXT | EXPERTS | dict(shared_expert_intermediate_size=24)),
}  # fmt: skip


def spelled_for_4(options: dict) -> dict:
    """rope_parameters as transformers 4 wants them, which ignores the new name."""
    rope = dict(options.get("rope_parameters") or {})
    options = {k: v for k, v in options.items() if k != "rope_parameters"}
    theta = {"rope_theta": rope.pop("rope_theta")} if rope else {}
    return options | theta | ({"rope_scaling": rope} if rope.get("rope_type", "default") != "default" else {})


def randomize(model):
    """Weights large enough that attention is far from uniform, norms and biases away from where they start."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            spread = 0.3 if parameter.ndim == 1 else 1.5 * parameter.shape[-1] ** -0.5
            parameter.copy_(spread * noise + (parameter if "norm" in name else 0))
    return model.eval()


def their_logits(model, ids, **options):
    with torch.no_grad():
        return model(torch.tensor(ids), use_cache=False, **options)


def our_logits(model, ids):
    graphdef, params = nnx.split(model)
    quick = {"xla_backend_optimization_level": 0}  # these models run once
    return jax.jit(lambda params: nnx.merge(graphdef, params)(jnp.asarray(ids))[0], compiler_options=quick)(params)


def random_ids(rows=2):
    return np.random.default_rng(0).integers(0, VOCAB, (rows, T))


def assert_same_logits(ours, theirs, capsys, name):
    difference = np.abs(np.asarray(ours) - theirs.numpy()).max()
    with capsys.disabled():
        print(f"  {name}: max |difference| {difference:.1e} of logits up to {theirs.abs().max():.1f}")
    assert difference < 1e-4
    assert theirs.std() > 0.3


@pytest.mark.parametrize("name", STOCK)
def test_import_gives_the_logits_of_transformers(name, tmp_path, capsys):
    family, options = STOCK[name]
    if transformers.__version__.startswith("4."):
        options = spelled_for_4(options)
    model = randomize(
        transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **SMALL | options))
    )
    model.save_pretrained(tmp_path)
    ids = random_ids()
    ours = our_logits(huggingface.load(tmp_path), ids)
    assert_same_logits(ours, their_logits(model, ids).logits, capsys, name)


def test_attention_maps_match(tmp_path):
    config = transformers.AutoConfig.for_model(
        "qwen3_next", **SMALL | heads(4, 2, 16) | NEXT, num_experts=0, attn_implementation="eager"
    )
    model = randomize(transformers.AutoModelForCausalLM.from_config(config))
    model.save_pretrained(tmp_path)
    ids = random_ids()
    theirs = their_logits(model, ids, output_attentions=True).attentions

    def probe(kind, **seen):
        return {"map": probabilities(seen["q"], seen["k"], scale=16**-0.5)[0]} if kind == "attention" else {}

    ours = huggingface.load(tmp_path).hidden(jnp.asarray(ids), probe=probe)[1]["probe"]["map"]
    for layer in range(2):
        np.testing.assert_allclose(ours[layer], theirs[layer].numpy(), atol=1e-5)
    assert np.asarray(ours).max(-1)[..., 4:].mean() > 0.2  # uniform would be 0.08


class AuthorsAttention(Qwen3Attention):
    """The paper authors' gated attention, stated anew from its description."""

    def __init__(self, config, layer_idx, width):
        super().__init__(config, layer_idx)
        self.N, self.K, self.width = config.num_attention_heads, config.num_key_value_heads, width
        out = self.N * (self.head_dim + width)
        self.q_proj = torch.nn.Linear(config.hidden_size, out, bias=config.attention_bias)

    def forward(self, hidden_states, position_embeddings, **_):
        b, s, _ = hidden_states.shape
        group = self.N // self.K
        packed = self.q_proj(hidden_states).view(b, s, self.K, -1)  # per KV group: its queries, then its gates
        q, gate = packed.split([group * self.head_dim, group * self.width], dim=-1)
        q = self.q_norm(q.reshape(b, s, self.N, self.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(hidden_states).view(b, s, self.K, -1)).transpose(1, 2)
        v = self.v_proj(hidden_states).view(b, s, self.K, -1).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        scores = q @ k.transpose(2, 3) / self.head_dim**0.5
        future = torch.ones(s, s, dtype=bool).triu(1)
        y = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        y = y.transpose(1, 2) * torch.sigmoid(gate.reshape(b, s, self.N, self.width))
        return self.o_proj(y.reshape(b, s, -1)), None


@pytest.fixture
def authors_model():
    def make(granularity, n, k, bias=False):
        config = transformers.AutoConfig.for_model("qwen3", **SMALL | heads(n, k), attention_bias=bias)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for i, layer in enumerate(model.model.layers):
            layer.self_attn = AuthorsAttention(config, i, 1 if granularity == "headwise" else 8)
        return randomize(model)

    return make


@pytest.mark.parametrize("granularity", ["headwise", "elementwise"])
@pytest.mark.parametrize(("n", "k", "bias"), [(4, 4, False), (6, 2, True), (4, 1, False)])
def test_authors_layout(granularity, n, k, bias, authors_model, tmp_path, capsys):
    model = authors_model(granularity, n, k, bias)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    config = model.config.to_dict() | {f"{granularity}_attn_output_gate": True, "use_qk_norm": True, "qkv_bias": bias}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ids = random_ids()
    ours = huggingface.load(tmp_path)
    theirs = their_logits(model, ids).logits
    assert_same_logits(our_logits(ours, ids), theirs, capsys, f"authors-{granularity}-{n}/{k}")

    huggingface.save(ours, ours.config, tmp_path / "again", layout="authors")
    state = {name: torch.tensor(np.array(x)) for name, x in huggingface.tensors_lib.Folder(tmp_path / "again").items()}
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[name], x) for name, x in model.state_dict().items())


BASE = TransformerConfig(
    vocab_size=VOCAB,
    d_model=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_dim=48,
    gates="none",
    tie_embeddings=False,
)
EXPORTS = {
    "qwen3": {},
    "qwen3-zero-centered": {"norm_zero_centered": True},
    "qwen3-window-tied": {"window": 5, "tie_embeddings": True},
    "qwen3-yarn": {"rope": RopeConfig(theta=1e6, scaling="yarn", factor=4.0, original_max_len=16)},
    "qwen3_moe": {"moe": MoEConfig(num_experts=6, top_k=2, expert_dim=16)},
    "llama": {"qk_norm": False, "attention_bias": True, "output_bias": True, "rope": RopeConfig(scaling="linear", factor=2.0)},
    "mistral": {"qk_norm": False, "window": 5},
    "qwen2": {"qk_norm": False, "attention_bias": True},
    "qwen3_next": {"gates": "g1"},
    "qwen3_next-zero-centered-bias": {
        "gates": "g1:bias", "norm_zero_centered": True, "attention_bias": True, "output_bias": True
    },
    "qwen3_next-partial-moe": {
        "gates": "g1", "rope": RopeConfig(fraction=0.5),
        "moe": MoEConfig(num_experts=6, top_k=2, expert_dim=16, shared_dim=24, shared_gate=True),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", EXPORTS)
def test_export_opens_in_transformers(name, tmp_path, capsys):
    config = dataclasses.replace(BASE, **EXPORTS[name])
    rng, params = np.random.default_rng(1), {}
    for path, leaf in abstract_parameters(config).items():
        spread = 0.3 if "norm" in path or "bias" in path else 1.5 * config.d_model**-0.5
        start = 1 if "norm" in path and not config.norm_zero_centered else 0
        params[path] = (start + spread * rng.normal(size=leaf.shape)).astype(np.float32)
    model = build(config, params)
    huggingface.save(model, config, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == name.split("-")[0]
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True, dtype=torch.float32)
    assert not any(report.values()), report
    ids = random_ids()
    logits = their_logits(theirs.eval(), ids).logits
    assert_same_logits(our_logits(model, ids), logits, capsys, f"export {name}")
