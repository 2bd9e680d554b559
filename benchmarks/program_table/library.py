"""Models of ``transformers``, ``timm`` and ``torchvision`` with small random configurations, where installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from benchmarks.program_table import Made, epochs, made, normal, pairs, program, sgd

CE = F.cross_entropy
_SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
_DRY = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _stacked(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([r[name] for r in rows]) for name in rows[0]}


def _named(net: nn.Module, lr: float = 0.05, **columns: Tensor) -> Made:
    count = len(next(iter(columns.values())))
    rows = [{name: column[i] for name, column in columns.items()} for i in range(count)]
    net = net.double()
    return net, sgd(net, lr), DataLoader(rows, 6, collate_fn=_stacked)  # type: ignore[arg-type]


def _inside(net: Any, batch: Any) -> Tensor:
    return net(**batch).loss  # type: ignore[no-any-return]


def _tokens(high: int = 50, length: int = 8) -> Tensor:
    return torch.randint(2, high, (20, length))


def _mask(length: int = 8) -> Tensor:
    return (torch.arange(length)[None] < torch.randint(3, length + 1, (20, 1))).long()


def _ignored(labels: Tensor) -> Tensor:
    return labels.masked_fill(_mask(labels.shape[1]) == 0, -100)


def _transformers() -> None:
    import transformers as t

    bert = {**_SMALL, **_DRY, "vocab_size": 50, "max_position_embeddings": 16}
    llama = {**_SMALL, "vocab_size": 50, "num_key_value_heads": 2, "max_position_embeddings": 16}
    gpt2 = {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "resid_pdrop": 0.0,
            "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip

    def text(make: Callable[[], nn.Module], labels: Callable[[], Tensor], lr: float = 0.05) -> Callable[[], Made]:
        return lambda: _named(make(), lr, input_ids=_tokens(), attention_mask=_mask(), labels=labels())

    def hf(name: str, make: Callable[[], Made]) -> None:
        program("transformers", name, make, epochs(_inside))

    classes = lambda: torch.randint(2, (20,))  # noqa: E731
    hf("BERT classifier", text(lambda: t.BertForSequenceClassification(t.BertConfig(**bert)), classes))
    hf("BERT masked language model", text(lambda: t.BertForMaskedLM(t.BertConfig(**bert)), lambda: _ignored(_tokens())))
    hf("RoBERTa tagger", text(lambda: t.RobertaForTokenClassification(t.RobertaConfig(**bert, pad_token_id=1)),
       lambda: _ignored(torch.randint(2, (20, 8)))))  # fmt: skip
    hf("GPT-2", text(lambda: t.GPT2LMHeadModel(t.GPT2Config(**gpt2)), lambda: _ignored(_tokens())))
    hf("GPT-2 with dropout", text(lambda: t.GPT2LMHeadModel(t.GPT2Config(**{**gpt2, "resid_pdrop": 0.2,
       "attn_pdrop": 0.2})), lambda: _ignored(_tokens())))  # fmt: skip
    hf("Llama", text(lambda: t.LlamaForCausalLM(t.LlamaConfig(**llama)), lambda: _ignored(_tokens())))
    # Grouped products know no float64.
    moe = t.MixtralConfig(**llama, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
    moe._experts_implementation = "eager"
    hf("Mixtral with its balancing loss", text(lambda: t.MixtralForCausalLM(moe), lambda: _ignored(_tokens())))
    hf("T5", lambda: _named(t.T5ForConditionalGeneration(t.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32,
       num_layers=2, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0)), input_ids=_tokens(),
       labels=_ignored(_tokens())))  # fmt: skip
    hf("ViT", lambda: _named(t.ViTForImageClassification(t.ViTConfig(**_SMALL, **_DRY, image_size=16, patch_size=8)),
       pixel_values=normal(20, 3, 16, 16), labels=torch.randint(2, (20,))))  # fmt: skip
    clip = t.CLIPConfig(
        text_config={**_SMALL, "vocab_size": 50, "max_position_embeddings": 16, "projection_dim": 8},
        vision_config={**_SMALL, "image_size": 16, "patch_size": 8, "projection_dim": 8}, projection_dim=8,
    )  # fmt: skip
    program("transformers", "CLIP, its own loss", lambda: _named(t.CLIPModel(clip), input_ids=_tokens(),
            attention_mask=_mask(), pixel_values=normal(20, 3, 16, 16)),
            epochs(lambda net, b: net(**b, return_loss=True).loss))  # fmt: skip
    hf("wav2vec2, audio", lambda: _named(t.Wav2Vec2ForSequenceClassification(t.Wav2Vec2Config(**_SMALL,
       conv_dim=(8, 8), conv_stride=(4, 2), conv_kernel=(8, 3), num_feat_extract_layers=2, hidden_dropout=0.0,
       attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0, layerdrop=0.0,
       apply_spec_augment=False, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, classifier_proj_size=8)),
       input_values=normal(20, 160), labels=torch.randint(2, (20,))))  # fmt: skip


def _timm() -> None:
    import timm

    def images(name: str, **options: Any) -> None:
        exact = {"batch_norm": "exact"} if any(k in name for k in ("resnet", "mobile")) else {}
        program("timm", name, lambda: made(timm.create_model(name, num_classes=3, **options), normal(12, 3, 32, 32),
                torch.randint(3, (12,)), lr=0.01), epochs(pairs(CE), 1), CE, within=1e-7, **exact)  # fmt: skip

    images("resnet10t")
    images("vit_tiny_patch16_224", img_size=32, embed_dim=16, depth=2, num_heads=2)
    images("convnext_atto", dims=(8, 8, 16, 16), depths=(1, 1, 1, 1))
    images("mixer_s32_224", img_size=32)
    images("mobilenetv3_small_050")


def _torchvision() -> None:
    from torchvision import models as v

    def images(name: str, make: Callable[[], nn.Module], size: int = 32, **options: Any) -> None:
        program("torchvision", name, lambda: made(make(), normal(12, 3, size, size), torch.randint(3, (12,)), lr=0.01),
                epochs(pairs(CE), 1), CE, within=1e-7, **options)  # fmt: skip

    images("resnet18", lambda: v.resnet18(num_classes=3), batch_norm="exact")
    images("resnet18, GroupNorm", lambda: v.resnet18(num_classes=3, norm_layer=lambda c: nn.GroupNorm(4, c)))
    images("vision transformer", lambda: v.VisionTransformer(32, 16, 2, 2, 16, 32, num_classes=3))
    images(
        "swin", lambda: v.SwinTransformer([4, 4], 8, [1, 1], [2, 2], [4, 4], stochastic_depth_prob=0.0, num_classes=3)
    )
    images("regnet", lambda: v.regnet_y_400mf(num_classes=3), batch_norm="exact")


if importlib.util.find_spec("transformers") is not None:
    _transformers()
if importlib.util.find_spec("timm") is not None:
    _timm()
if importlib.util.find_spec("torchvision") is not None:
    _torchvision()
