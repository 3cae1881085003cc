import pytest

from gptoss_engine.checkpoints.layouts import count_parameters, stored_tensors
from gptoss_engine.model_config import ModelConfig, YarnRope


def published(num_layers: int, num_experts: int) -> ModelConfig:
    return ModelConfig(
        num_layers=num_layers,
        hidden_size=2880,
        intermediate_size=2880,
        num_experts=num_experts,
        experts_per_token=4,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        vocab_size=201088,
        layer_types=("sliding_attention", "full_attention") * (num_layers // 2),
        sliding_window=128,
        rope=YarnRope(150000.0, 32.0, 32.0, 1.0, 4096),
        rms_norm_eps=1e-5,
        swiglu_alpha=1.702,
        swiglu_limit=7.0,
        max_model_len=131072,
        eos_token_ids=frozenset(),
    )


@pytest.mark.parametrize(
    ("num_layers", "num_experts", "total", "active"),
    [(24, 32, 20.91, 3.61), (36, 128, 116.83, 5.13)],
    ids=["20b", "120b"],
)
def test_the_published_models_have_their_published_sizes(
    num_layers: int, num_experts: int, total: float, active: float
):
    counts = count_parameters(published(num_layers, num_experts))
    assert [round(count / 1e9, 2) for count in counts] == [total, active]


def test_the_published_names_and_shapes():
    """As MODEL's tables list them for one layer of gpt-oss-120b."""
    parts = {}
    for layout in ("huggingface", "original", "dequantised"):
        found = stored_tensors(published(2, 128), layout)
        parts[layout] = {k: v for source in found.values() for k, v in source.parts.items()}
    layer = "model.layers.1"
    for name, shape in {
        "model.embed_tokens.weight": (201088, 2880),
        "model.norm.weight": (2880,),
        "lm_head.weight": (201088, 2880),
        f"{layer}.input_layernorm.weight": (2880,),
        f"{layer}.post_attention_layernorm.weight": (2880,),
        f"{layer}.self_attn.q_proj.weight": (4096, 2880),
        f"{layer}.self_attn.k_proj.bias": (512,),
        f"{layer}.self_attn.v_proj.weight": (512, 2880),
        f"{layer}.self_attn.o_proj.weight": (2880, 4096),
        f"{layer}.self_attn.o_proj.bias": (2880,),
        f"{layer}.self_attn.sinks": (64,),
        f"{layer}.mlp.router.weight": (128, 2880),
        f"{layer}.mlp.router.bias": (128,),
        f"{layer}.mlp.experts.gate_up_proj_blocks": (128, 5760, 90, 16),
        f"{layer}.mlp.experts.gate_up_proj_scales": (128, 5760, 90),
        f"{layer}.mlp.experts.gate_up_proj_bias": (128, 5760),
        f"{layer}.mlp.experts.down_proj_blocks": (128, 2880, 90, 16),
        f"{layer}.mlp.experts.down_proj_bias": (128, 2880),
    }.items():
        assert parts["huggingface"][name] == shape
    for name, shape in {
        "embedding.weight": (201088, 2880),
        "unembedding.weight": (201088, 2880),
        "norm.scale": (2880,),
        "block.1.attn.norm.scale": (2880,),
        "block.1.attn.qkv.weight": (5120, 2880),
        "block.1.attn.out.weight": (2880, 4096),
        "block.1.attn.sinks": (64,),
        "block.1.mlp.gate.weight": (128, 2880),
        "block.1.mlp.mlp1_weight.blocks": (128, 5760, 90, 16),
        "block.1.mlp.mlp2_weight.scales": (128, 2880, 90),
        "block.1.mlp.mlp1_bias": (128, 5760),
    }.items():
        assert parts["original"][name] == shape
    assert parts["dequantised"][f"{layer}.mlp.experts.gate_up_proj"] == (128, 2880, 5760)
    assert parts["dequantised"][f"{layer}.mlp.experts.down_proj"] == (128, 2880, 2880)
