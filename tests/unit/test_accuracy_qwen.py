"""The accuracy bench's Qwen is Hugging Face's."""

import pytest
import torch
import transformers

from megatron.compression.huggingface.models import DenseModel
from scripts.accuracy import layers
from scripts.accuracy.exchange import Exchange
from scripts.accuracy.model import GPT, ModelConfig, token_losses
from scripts.accuracy.settings import setting_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_qwen_is_hugging_faces(family):
    """Losses and gradients of the same weights, with and without sequence parallelism."""
    qwen = DenseModel(
        **dict(family=family, layers=2, hidden=64, ffn=96, heads=4, groups=2, head_dim=16, vocabulary=64),
        **dict(tied=family == "qwen3", positions=16),
    )
    config = ModelConfig(64, 2, 64, 4, 16, torch.float32, qwen=qwen)
    model = GPT(config)
    model.initialise(1)
    theirs = transformers.Qwen2Config if family == "qwen2" else transformers.Qwen3Config
    more = {"head_dim": 16} if family == "qwen3" else {}
    reference = transformers.AutoModelForCausalLM.from_config(
        theirs(
            **dict(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2),
            **dict(num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-6, **more),
            **dict(rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
            tie_word_embeddings=qwen.tied,
        )
    )
    names = {}
    for layer, block in enumerate(model.blocks):
        prefix, attention = f"model.layers.{layer}", f"model.layers.{layer}.self_attn"
        for vector in (block.norm1, block.norm2, block.q_norm, block.k_norm):
            if vector is not None:
                torch.nn.init.uniform_(vector.weight, 0.5, 1.5)
        heads = block.qkv.view(2, 4, 16, 64)
        parts = {"q": heads[:, :2].reshape(64, 64), "k": heads[:, 2].reshape(32, 64)}
        parts["v"] = heads[:, 3].reshape(32, 64)
        names |= {f"{attention}.{name}_proj.weight": part for name, part in parts.items()}
        if block.qkv_bias is not None:
            torch.nn.init.normal_(block.qkv_bias)
            bias = block.qkv_bias.view(2, 4, 16)
            parts = {"q": bias[:, :2], "k": bias[:, 2], "v": bias[:, 3]}
            names |= {f"{attention}.{name}_proj.bias": part.reshape(-1) for name, part in parts.items()}
        else:
            names |= {
                f"{attention}.{name}_norm.weight": getattr(block, f"{name}_norm").weight for name in "qk"
            }
        names |= {f"{attention}.o_proj.weight": block.projection, f"{prefix}.mlp.down_proj.weight": block.fc2}
        names |= {f"{prefix}.mlp.gate_proj.weight": block.fc1[0::2]}
        names |= {f"{prefix}.mlp.up_proj.weight": block.fc1[1::2]}
        names |= {f"{prefix}.input_layernorm.weight": block.norm1.weight}
        names |= {f"{prefix}.post_attention_layernorm.weight": block.norm2.weight}
    names |= {"model.embed_tokens.weight": model.words, "model.norm.weight": model.norm.weight}
    names |= {"lm_head.weight": model.output}
    reference.load_state_dict({name: value.detach() for name, value in names.items()})
    ids, targets = torch.randint(64, (2, 3, 16), generator=torch.Generator().manual_seed(2))
    expected = token_losses(reference(ids).logits.reshape(-1, 64), targets.reshape(-1))
    expected.mean().backward()
    for name in ("none", "none-sp"):
        setting = setting_of(name)
        layers.attach(Exchange(setting))
        model.use(setting)
        model.zero_grad()
        losses = model(ids, targets)
        assert torch.allclose(losses, expected, atol=1e-5)
        losses.mean().backward()
        attention = reference.model.layers[0].self_attn
        wanted = torch.cat([getattr(attention, f"{name}_proj").weight.grad for name in "qkv"])
        ours = model.blocks[0].qkv.grad.view(2, 4, 16, 64)
        ours = torch.cat(
            [ours[:, :2].reshape(64, 64), ours[:, 2].reshape(32, 64), ours[:, 3].reshape(32, 64)]
        )
        assert torch.allclose(ours, wanted, atol=1e-5 * float(wanted.abs().max()) + 1e-8)
        words = reference.model.embed_tokens.weight.grad
        assert torch.allclose(model.words.grad, words, atol=1e-5 * float(words.abs().max()) + 1e-8)
