"""Small models of transformers, timm, torchvision and diffusers, without weights, and how to train
them.

``FAMILIES`` are those of ``docs/models.md``. Sizes are odd, so that no number of ranks divides
them; dropout is off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from test.common.parity import remat_inside
from test.common.scenarios import fsdp, make
from test.common.training import Batch
from xla_fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

ROWS = 3  # of a rank's part of a batch
VOCABULARY = 37
LABELS = 7
EXPERTS = 8
IDS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": 25, "intermediate_size": 27}
EVEN = {
    "hidden_size": 24,
    "intermediate_size": 27,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
HEADS = {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 6}

# ---------------------------------------------------------------- language models


def gpt2() -> nn.Module:
    """Its head is tied to its embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    no_dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    return GPT2LMHeadModel(
        GPT2Config(n_positions=13, n_embd=22, n_layer=2, n_head=2, **no_dropout, **IDS)
    )


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    ids = {"vocab_size": VOCABULARY, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **SIZES, **HEADS, **ids))


def qwen2() -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"hidden_size": 24, "intermediate_size": 27}
    return Qwen2ForCausalLM(Qwen2Config(num_hidden_layers=3, **sizes, **heads, **IDS))


def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=3, **SIZES, **HEADS, **IDS))


def gemma2() -> nn.Module:
    """Every second layer attends to a window."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    window = {"sliding_window": 4, "query_pre_attn_scalar": 6}
    return Gemma2ForCausalLM(Gemma2Config(num_hidden_layers=4, **SIZES, **HEADS, **IDS, **window))


def gemma3() -> nn.Module:
    """Two of three layers attend to a window, with other positions."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    window = {"sliding_window": 4, "query_pre_attn_scalar": 6}
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    return Gemma3ForCausalLM(
        Gemma3TextConfig(num_hidden_layers=6, layer_types=kinds, **SIZES, **HEADS, **IDS, **window)
    )


def gpt_neox() -> nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = {"hidden_size": 24, "intermediate_size": 27, "num_attention_heads": 3}
    return GPTNeoXForCausalLM(GPTNeoXConfig(num_hidden_layers=3, **sizes, **IDS))


def phi3() -> nn.Module:
    from transformers import Phi3Config, Phi3ForCausalLM

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"hidden_size": 24, "intermediate_size": 27}
    return Phi3ForCausalLM(Phi3Config(num_hidden_layers=3, **sizes, **heads, **IDS))


def mamba() -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    sizes = {"hidden_size": 14, "state_size": 3, "time_step_rank": 2, "conv_kernel": 3}
    return MambaForCausalLM(MambaConfig(num_hidden_layers=3, **sizes, **IDS))


def mamba2() -> nn.Module:
    from transformers import Mamba2Config, Mamba2ForCausalLM

    heads = {"num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4}
    sizes = {"hidden_size": 16, "state_size": 3, "conv_kernel": 3, "expand": 2}
    return Mamba2ForCausalLM(Mamba2Config(num_hidden_layers=3, **sizes, **heads, **IDS))


def smollm3() -> nn.Module:
    """Every fourth layer has no rotary positions."""
    from transformers import SmolLM3Config, SmolLM3ForCausalLM

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"hidden_size": 24, "intermediate_size": 27}
    return SmolLM3ForCausalLM(SmolLM3Config(num_hidden_layers=4, **sizes, **heads, **IDS))


def modernbert() -> nn.Module:
    """Two of three layers attend to a window."""
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    sizes = {"hidden_size": 24, "intermediate_size": 27, "num_attention_heads": 4}
    places = {"max_position_embeddings": 16, "local_attention": 4}
    ids = {**IDS, "cls_token_id": 1, "sep_token_id": 2}
    return ModernBertForMaskedLM(ModernBertConfig(num_hidden_layers=3, **sizes, **places, **ids))


def deberta() -> nn.Module:
    """Relative positions."""
    from transformers import DebertaV2Config, DebertaV2ForMaskedLM

    sizes = {"hidden_size": 24, "intermediate_size": 27, "num_attention_heads": 4}
    places = {"relative_attention": True, "max_relative_positions": 8}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    ids = {"vocab_size": VOCABULARY, "pad_token_id": 0, "type_vocab_size": 0}
    return DebertaV2ForMaskedLM(
        DebertaV2Config(
            num_hidden_layers=3,
            pos_att_type=["p2c", "c2p"],
            max_position_embeddings=16,
            **sizes,
            **places,
            **no_dropout,
            **ids,
        )
    )


def jamba(experts: str = "batched_mm") -> nn.Module:
    """Every second layer attends and has experts; the others are of Mamba."""
    from transformers import JambaConfig, JambaForCausalLM

    every_second = {"attn_layer_period": 2, "expert_layer_period": 2}
    offsets = {"attn_layer_offset": 1, "expert_layer_offset": 1}
    routing = {"num_experts": 4, "num_experts_per_tok": 2}
    state = {"mamba_d_state": 3, "mamba_d_conv": 3, "mamba_dt_rank": 2}
    sizes = {**EVEN, **every_second, **offsets, **routing, **state}
    config = JambaConfig(num_hidden_layers=4, **sizes, **IDS)
    return _with_experts(JambaForCausalLM, config, experts)


def zamba2() -> nn.Module:
    """Layers of Mamba2, and two that share one block which attends."""
    from transformers import Zamba2Config, Zamba2ForCausalLM

    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "attention_head_dim": 12}
    state = {"mamba_d_state": 3, "mamba_d_conv": 3, "mamba_ngroups": 1, "mamba_expand": 2}
    mamba = {"n_mamba_heads": 4, "mamba_headdim": 12, "chunk_size": 4, "num_mem_blocks": 1}
    sizes = {"hidden_size": 24, "intermediate_size": 27, **heads, **state, **mamba}
    kinds = ["mamba", "hybrid"] * 2
    return Zamba2ForCausalLM(
        Zamba2Config(num_hidden_layers=4, layers_block_type=kinds, **sizes, **IDS)
    )


def qwen3_next(experts: str = "batched_mm") -> nn.Module:
    """Three of four layers have linear attention."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    heads = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "head_dim": 8}
    widths = {"linear_key_head_dim": 6, "linear_value_head_dim": 6, "linear_conv_kernel_dim": 3}
    routing = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 11}
    sizes = {**EVEN, **heads, **widths, **routing, "shared_expert_intermediate_size": 13}
    config = Qwen3NextConfig(num_hidden_layers=4, **sizes, **IDS)
    return _with_experts(Qwen3NextForCausalLM, config, experts)


def gpt_oss(experts: str = "batched_mm") -> nn.Module:
    """Attention with sinks; every second layer attends to a window."""
    from transformers import GptOssConfig, GptOssForCausalLM

    routing = {"num_local_experts": 4, "num_experts_per_tok": 2}
    sizes = {**EVEN, **routing, "head_dim": 8, "sliding_window": 4}
    return _with_experts(
        GptOssForCausalLM, GptOssConfig(num_hidden_layers=4, **sizes, **IDS), experts
    )


def granite_hybrid(experts: str = "batched_mm") -> nn.Module:
    """Layers of Mamba2 and of attention in turns, all with experts."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    routing = {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 13}
    state = {"mamba_d_state": 3, "mamba_d_conv": 3, "mamba_n_groups": 1, "mamba_expand": 2}
    mamba = {"mamba_n_heads": 4, "mamba_d_head": 12, "mamba_chunk_size": 4}
    sizes = {**EVEN, **routing, **state, **mamba, "layer_types": ["mamba", "attention"] * 2}
    config = GraniteMoeHybridConfig(num_hidden_layers=4, **sizes, **IDS)
    return _with_experts(GraniteMoeHybridForCausalLM, config, experts)


def mixtral(experts: str = "batched_mm") -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    routing = {"num_local_experts": EXPERTS, "num_experts_per_tok": 2}
    config = MixtralConfig(num_hidden_layers=3, **SIZES, **HEADS, **IDS, **routing)
    return _with_experts(MixtralForCausalLM, config, experts)


def qwen3_moe(experts: str = "batched_mm") -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    routing = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 11}
    config = Qwen3MoeConfig(num_hidden_layers=3, **SIZES, **HEADS, **IDS, **routing)
    return _with_experts(Qwen3MoeForCausalLM, config, experts)


def deepseek_v3(experts: str = "batched_mm") -> nn.Module:
    """Its first layer has no experts."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "q_lora_rank": 10}
    sizes = {"kv_lora_rank": 9, "qk_rope_head_dim": 4, "v_head_dim": 6, "qk_nope_head_dim": 6}
    routing = {"n_routed_experts": EXPERTS, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    config = DeepseekV3Config(
        num_hidden_layers=3,
        first_k_dense_replace=1,
        moe_intermediate_size=11,
        **SIZES,
        **heads,
        **sizes,
        **routing,
        **IDS,
    )
    return _with_experts(DeepseekV3ForCausalLM, config, experts)


def _with_experts(model_class: Any, config: Any, experts: str) -> nn.Module:
    config._experts_implementation = experts
    return model_class(config)


def text(generator: torch.Generator) -> Batch:
    """The model shifts the labels itself."""
    ids = torch.randint(3, VOCABULARY, (ROWS, 9), generator=generator)
    return {"input_ids": ids, "labels": ids}


def few_words(generator: torch.Generator) -> Batch:
    """So few that some experts have none of a rank's."""
    ids = torch.randint(3, VOCABULARY, (1, 4), generator=generator)
    return {"input_ids": ids, "labels": ids}


# ---------------------------------------------------------------- images and text, sound and text

IMAGE_TOKEN = VOCABULARY - 1


def qwen2_vl() -> nn.Module:
    """Positions of three axes."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    rope = {"rope_type": "default", "mrope_section": [1, 1, 1], "rope_theta": 10000.0}
    vision = {"depth": 3, "embed_dim": 16, "hidden_size": 24, "num_heads": 2, "mlp_ratio": 2}
    patches = {"patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 1}
    tokens = {"image": IMAGE_TOKEN, "video": 35, "vision_start": 34, "vision_end": 33}
    return Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(
            text_config={**EVEN, **IDS, "num_hidden_layers": 3, "rope_parameters": rope},
            vision_config={**vision, **patches},
            **{f"{name}_token_id": number for name, number in tokens.items()},
        )
    )


def images_and_text(generator: torch.Generator) -> Batch:
    """An image of 4 x 4 patches for each row, which become 4 tokens."""
    ids = torch.randint(3, 30, (ROWS, 9), generator=generator)
    ids[:, 0], ids[:, 1:5], ids[:, 5] = 34, IMAGE_TOKEN, 33
    return {
        "input_ids": ids,
        "labels": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == IMAGE_TOKEN).int(),
        "pixel_values": torch.randn(ROWS * 16, 12, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * ROWS),
    }


def paligemma() -> nn.Module:
    """The image and what is asked are seen from everywhere."""
    from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

    text = {**EVEN, **IDS, "num_key_value_heads": 1, "head_dim": 6, "num_hidden_layers": 3}
    sizes = {"hidden_size": 18, "intermediate_size": 23, "image_size": 10, "patch_size": 5}
    heads = {"num_hidden_layers": 3, "num_attention_heads": 3, "vision_use_head": False}
    return PaliGemmaForConditionalGeneration(
        PaliGemmaConfig(
            text_config={"model_type": "gemma", **text},
            vision_config={"model_type": "siglip_vision_model", **sizes, **heads},
            projection_dim=24,
            image_token_index=IMAGE_TOKEN,
        )
    )


def asked_images(generator: torch.Generator) -> Batch:
    ids = torch.randint(3, 30, (ROWS, 9), generator=generator)
    ids[:, :4] = IMAGE_TOKEN
    return {
        "input_ids": ids,
        "labels": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": (torch.arange(9) > 5).long().expand(ROWS, 9),
        "pixel_values": torch.randn(ROWS, 3, 10, 10, generator=generator),
    }


def clap() -> nn.Module:
    """Of a spectrum's windows every second block's are shifted. In fp64, for its BatchNorm."""
    from transformers import ClapConfig, ClapModel

    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    text = {"hidden_size": 18, "intermediate_size": 23, "num_hidden_layers": 2}
    windows = {"spec_size": 32, "num_mel_bins": 8, "window_size": 2, "patch_stride": [4, 4]}
    sizes = {"patch_embeds_hidden_size": 9, "hidden_size": 18, "depths": [2, 2]}
    heads = {"num_attention_heads": [3, 3], "num_hidden_layers": 2, "drop_path_rate": 0.0}
    ids = {"vocab_size": VOCABULARY, "max_position_embeddings": 16, "num_attention_heads": 3}
    return ClapModel(
        ClapConfig(
            text_config={**text, **ids, **no_dropout},
            audio_config={**windows, **sizes, **heads, **no_dropout},
            projection_dim=13,
        )
    ).double()


def sounds_and_text(generator: torch.Generator) -> Batch:
    ids = torch.randint(3, VOCABULARY, (ROWS, 9), generator=generator)
    sounds = torch.randn(ROWS, 1, 128, 8, generator=generator).double()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "input_features": sounds}


# ---------------------------------------------------------------- from sequences to sequences


def transformer() -> nn.Module:
    """``nn.Transformer``."""
    return nn.Transformer(18, 3, 3, 3, 23, dropout=0.0, batch_first=True)


def sequences(generator: torch.Generator) -> Batch:
    src = torch.randn(ROWS, 5, 18, generator=generator)
    return {"src": src, "tgt": torch.randn(ROWS, 4, 18, generator=generator)}


def t5() -> nn.Module:
    """Encoder, decoder and head share one embedding."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 14, "d_kv": 5, "d_ff": 19, "num_layers": 2, "num_heads": 3}
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            **sizes,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            use_cache=False,  # a cache would grow when a layer is recomputed
        )
    )


def t5_of_four() -> nn.Module:
    """With more layers than the first, which alone has relative positions."""
    model: Any = t5()
    config = model.config
    config.num_layers = config.num_decoder_layers = 4
    return type(model)(config)


def pegasus() -> nn.Module:
    from transformers import PegasusConfig, PegasusForConditionalGeneration

    layers = {f"{part}_layers": 3 for part in ("encoder", "decoder")}
    heads = {f"{part}_attention_heads": 3 for part in ("encoder", "decoder")}
    widths = {f"{part}_ffn_dim": 23 for part in ("encoder", "decoder")}
    ids = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 1}
    return PegasusForConditionalGeneration(
        PegasusConfig(
            d_model=18,
            dropout=0.0,
            max_position_embeddings=16,
            decoder_start_token_id=0,
            use_cache=False,
            **layers,
            **heads,
            **widths,
            **ids,
        )
    )


def translation(generator: torch.Generator) -> Batch:
    """Of other lengths, and with padding."""
    source = torch.randint(3, VOCABULARY, (ROWS, 9), generator=generator)
    mask = torch.ones_like(source)
    mask[0, 6:] = 0
    labels = torch.randint(3, VOCABULARY, (ROWS, 5), generator=generator)
    return {"input_ids": source, "attention_mask": mask, "labels": labels}


def whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    layers = {f"{part}_layers": 3 for part in ("encoder", "decoder")}
    heads = {f"{part}_attention_heads": 3 for part in ("encoder", "decoder")}
    widths = {f"{part}_ffn_dim": 23 for part in ("encoder", "decoder")}
    sizes = {"d_model": 18, "num_mel_bins": 7, "max_source_positions": 11}
    return WhisperForConditionalGeneration(
        WhisperConfig(
            max_target_positions=9,
            decoder_start_token_id=1,
            **sizes,
            **layers,
            **heads,
            **widths,
            **IDS,
        )
    )


def speech(generator: torch.Generator) -> Batch:
    features = torch.randn(ROWS, 7, 22, generator=generator)
    labels = torch.randint(3, VOCABULARY, (ROWS, 5), generator=generator)
    return {"input_features": features, "labels": labels}


# ---------------------------------------------------------------- images


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 21, "intermediate_size": 23, "image_size": 10, "patch_size": 5}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return ViTForImageClassification(
        ViTConfig(
            num_hidden_layers=2, num_attention_heads=3, num_labels=LABELS, **sizes, **no_dropout
        )
    )


def dinov2() -> nn.Module:
    from transformers import Dinov2Config, Dinov2ForImageClassification

    sizes = {"hidden_size": 21, "mlp_ratio": 2, "image_size": 10, "patch_size": 5}
    return Dinov2ForImageClassification(
        Dinov2Config(num_hidden_layers=3, num_attention_heads=3, num_labels=LABELS, **sizes)
    )


def convnext() -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    sizes = {"num_stages": 2, "hidden_sizes": [10, 14], "depths": [3, 2], "image_size": 10}
    return ConvNextForImageClassification(
        ConvNextConfig(patch_size=1, layer_scale_init_value=0.5, num_labels=LABELS, **sizes)
    )


def clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    sizes = {**SIZES, "num_hidden_layers": 3, "num_attention_heads": 5}
    return CLIPModel(
        CLIPConfig(
            text_config={**sizes, **IDS, "max_position_embeddings": 9},
            vision_config={**sizes, "image_size": 10, "patch_size": 5},
            projection_dim=13,
        )
    )


def swin() -> nn.Module:
    """Windows of every second block are shifted."""
    from timm.models.swin_transformer import SwinTransformer

    sizes = {"img_size": 16, "patch_size": 2, "window_size": 2, "embed_dim": 9, "num_heads": (3, 3)}
    return SwinTransformer(depths=(4, 2), drop_path_rate=0.0, num_classes=LABELS, **sizes)


def mixer() -> nn.Module:
    from timm.models.mlp_mixer import MlpMixer

    return MlpMixer(LABELS, img_size=16, patch_size=8, num_blocks=3, embed_dim=21)


def resnet18() -> nn.Module:
    """Without the two widest stages, which hold 95% of its parameters. In fp64, as BatchNorm over a
    few small images makes of rounding errors what cannot be compared."""
    from torchvision.models import resnet18

    model = resnet18(num_classes=LABELS)
    model.layer3 = model.layer4 = nn.Identity()
    model.fc = nn.Linear(128, LABELS)
    return model.double()


def sam() -> nn.Module:
    """Two of three layers attend to windows."""
    from transformers import SamConfig, SamModel

    sizes = {"hidden_size": 12, "output_channels": 8, "image_size": 16, "patch_size": 4}
    windows = {"window_size": 2, "global_attn_indexes": [1], "num_pos_feats": 4}
    prompts = {"image_size": 16, "patch_size": 4, "mask_input_channels": 4}
    heads = {"num_attention_heads": 2, "num_hidden_layers": 2, "attention_downsample_rate": 1}
    return SamModel(
        SamConfig(
            vision_config={
                **sizes,
                **windows,
                "num_hidden_layers": 3,
                "num_attention_heads": 3,
                "mlp_ratio": 2.0,
            },
            prompt_encoder_config={"hidden_size": 8, **prompts},
            mask_decoder_config={
                "hidden_size": 8,
                "mlp_dim": 11,
                "iou_head_hidden_dim": 9,
                **heads,
            },
        )
    )


def convnext_timm() -> nn.Module:
    from timm.models.convnext import ConvNeXt

    return ConvNeXt(
        num_classes=LABELS,
        depths=(2, 3, 1, 1),
        dims=(7, 9, 10, 11),
        patch_size=2,
        ls_init_value=0.5,
    )


def efficientnet() -> nn.Module:
    """In fp64, as its BatchNorm is over a few small images."""
    from timm.models import efficientnet

    stages = [["ds_r1_k3_s1_e1_c8_se0.25"], ["ir_r3_k3_s2_e2_c12_se0.25"]]
    return efficientnet.EfficientNet(
        efficientnet.decode_arch_def(stages), num_classes=LABELS, stem_size=6, num_features=17
    ).double()


def maxvit() -> nn.Module:
    """A convolution, attention to windows and attention to a grid. In fp64, for its BatchNorm."""
    from timm.models import maxxvit

    attention = maxxvit.MaxxVitTransformerCfg(dim_head=6, window_size=(2, 2))
    sizes = {"embed_dim": (12, 18), "depths": (1, 2), "stem_width": 7}
    config = maxxvit.MaxxVitCfg(block_type=("M", "M"), transformer_cfg=attention, **sizes)
    return maxxvit.MaxxVit(config, img_size=16, num_classes=LABELS).double()


def unet() -> nn.Module:
    from diffusers import UNet2DModel

    kinds = {
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }
    sizes = {"block_out_channels": (8, 12), "norm_num_groups": 4, "attention_head_dim": 4}
    return UNet2DModel(sample_size=8, layers_per_block=1, **sizes, **kinds)


def dit() -> nn.Module:
    from diffusers import DiTTransformer2DModel

    sizes = {"num_attention_heads": 3, "attention_head_dim": 8, "num_layers": 3, "patch_size": 2}
    channels = {"in_channels": 3, "out_channels": 3, "norm_num_groups": 3}
    model = DiTTransformer2DModel(sample_size=8, num_embeds_ada_norm=11, **channels, **sizes)
    for block in model.transformer_blocks:
        block.norm1.emb.class_embedder.dropout_prob = 0.0
    return model


def noisy_images(generator: torch.Generator) -> Batch:
    times = torch.randint(0, 11, (ROWS,), generator=generator)
    return {"sample": torch.randn(ROWS, 3, 8, 8, generator=generator), "timestep": times}


def noisy_labelled_images(generator: torch.Generator) -> Batch:
    batch = noisy_images(generator)
    return {
        "hidden_states": batch["sample"],
        "timestep": batch["timestep"],
        "class_labels": _labels(generator),
    }


def pixels_with_points(generator: torch.Generator) -> Batch:
    return {
        "pixel_values": torch.randn(ROWS, 3, 16, 16, generator=generator),
        "input_points": 16 * torch.rand(ROWS, 1, 2, 2, generator=generator),
        "input_labels": torch.ones(ROWS, 1, 2, dtype=torch.long),
    }


def images(generator: torch.Generator) -> Batch:
    pixels = torch.randn(ROWS, 3, 10, 10, generator=generator)
    return {"pixel_values": pixels, "labels": _labels(generator)}


def bare_images(generator: torch.Generator, size: int = 17) -> Batch:
    return {"x": torch.randn(ROWS, 3, size, size, generator=generator).double()}


def tiny_images(generator: torch.Generator) -> Batch:
    return bare_images(generator, 16)


def small_images(generator: torch.Generator, size: int = 16) -> Batch:
    return {"x": torch.randn(ROWS, 3, size, size, generator=generator)}


def larger_images(generator: torch.Generator) -> Batch:
    return small_images(generator, 32)


def captions(generator: torch.Generator) -> Batch:
    ids = torch.randint(3, VOCABULARY, (ROWS, 9), generator=generator)
    ids[:, -1] = IDS["eos_token_id"]
    return {"input_ids": ids, "pixel_values": torch.randn(ROWS, 3, 10, 10, generator=generator)}


def _labels(generator: torch.Generator) -> Tensor:
    return torch.randint(0, LABELS, (ROWS,), generator=generator)


# ---------------------------------------------------------------- families


@dataclass(frozen=True)
class Family:
    """A model of the table.

    Args:
        name: as in the table.
        build: makes it.
        inputs: makes a rank's part of a batch.
        layers: names of the classes whose modules are units.
        containers: of the layers, to be run as loops.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], Batch]
    layers: tuple[str, ...]
    containers: tuple[str, ...] = ("model.layers",)


FAMILIES = {
    family.name: family
    for family in (
        Family("GPT-2", gpt2, text, ("GPT2Block",), ("transformer.h",)),
        Family("Llama", llama, text, ("LlamaDecoderLayer",)),
        Family("Qwen2", qwen2, text, ("Qwen2DecoderLayer",)),
        Family("Qwen3", qwen3, text, ("Qwen3DecoderLayer",)),
        Family("Gemma2", gemma2, text, ("Gemma2DecoderLayer",)),
        Family("Gemma3", gemma3, text, ("Gemma3DecoderLayer",)),
        Family("GPT-NeoX", gpt_neox, text, ("GPTNeoXLayer",), ("gpt_neox.layers",)),
        Family("Phi3", phi3, text, ("Phi3DecoderLayer",)),
        Family("Mamba", mamba, text, ("MambaBlock",), ("backbone.layers",)),
        Family("Mamba2", mamba2, text, ("Mamba2Block",), ("backbone.layers",)),
        Family("SmolLM3", smollm3, text, ("SmolLM3DecoderLayer",)),
        Family("ModernBERT", modernbert, text, ("ModernBertEncoderLayer",)),
        Family("DeBERTa", deberta, text, ("DebertaV2Layer",), ("deberta.encoder.layer",)),
        Family("Jamba", jamba, few_words, ("JambaAttentionDecoderLayer", "JambaMambaDecoderLayer")),
        Family("Zamba2", zamba2, text, ("Zamba2MambaDecoderLayer", "Zamba2HybridLayer")),
        Family("Qwen3-Next", qwen3_next, few_words, ("Qwen3NextDecoderLayer",)),
        Family("GPT-OSS", gpt_oss, few_words, ("GptOssDecoderLayer",)),
        Family("GraniteMoeHybrid", granite_hybrid, few_words, ("GraniteMoeHybridDecoderLayer",)),
        Family("Mixtral", mixtral, few_words, ("MixtralDecoderLayer",)),
        Family("Qwen3-MoE", qwen3_moe, few_words, ("Qwen3MoeDecoderLayer",)),
        Family("DeepSeek-V3", deepseek_v3, few_words, ("DeepseekV3DecoderLayer",)),
        Family("T5", t5_of_four, translation, ("T5Block",), ("encoder.block", "decoder.block")),
        Family(
            "Pegasus",
            pegasus,
            translation,
            ("PegasusEncoderLayer", "PegasusDecoderLayer"),
            ("model.encoder.layers", "model.decoder.layers"),
        ),
        Family(
            "Whisper",
            whisper,
            speech,
            ("WhisperEncoderLayer", "WhisperDecoderLayer"),
            ("model.encoder.layers", "model.decoder.layers"),
        ),
        Family(
            "CLIP",
            clip,
            captions,
            ("CLIPEncoderLayer",),
            ("text_model.encoder.layers", "vision_model.encoder.layers"),
        ),
        Family("ViT", vit, images, ("ViTLayer",), ("vit.layers",)),
        Family("DINOv2", dinov2, images, ("Dinov2Layer",), ("dinov2.encoder.layer",)),
        Family(
            "ConvNeXt",
            convnext,
            images,
            ("ConvNextLayer",),
            ("convnext.encoder.stages.0.layers", "convnext.encoder.stages.1.layers"),
        ),
        Family(
            "Swin (timm)",
            swin,
            small_images,
            ("SwinTransformerBlock",),
            ("layers.0.blocks", "layers.1.blocks"),
        ),
        Family(
            "ConvNeXt (timm)",
            convnext_timm,
            larger_images,
            ("ConvNeXtBlock",),
            ("stages.0.blocks", "stages.1.blocks"),
        ),
        Family(
            "EfficientNet (timm)",
            efficientnet,
            bare_images,
            ("InvertedResidual", "DepthwiseSeparableConv"),
            ("blocks.1",),
        ),
        Family("MaxViT (timm)", maxvit, tiny_images, ("MaxxVitBlock",), ("stages.1.blocks",)),
        Family("SAM", sam, pixels_with_points, ("SamVisionLayer",), ("vision_encoder.layers",)),
        Family(
            "Qwen2-VL",
            qwen2_vl,
            images_and_text,
            ("Qwen2VLVisionBlock", "Qwen2VLDecoderLayer"),
            ("model.visual.blocks", "model.language_model.layers"),
        ),
        Family(
            "PaliGemma",
            paligemma,
            asked_images,
            ("SiglipEncoderLayer", "GemmaDecoderLayer"),
            ("model.vision_tower.encoder.layers", "model.language_model.layers"),
        ),
        Family(
            "CLAP",
            clap,
            sounds_and_text,
            ("ClapAudioLayer", "ClapTextLayer"),
            ("text_model.encoder.layer",),
        ),
        Family(
            "U-Net (diffusers)",
            unet,
            noisy_images,
            ("ResnetBlock2D", "Attention"),
            ("up_blocks.0.resnets",),
        ),
        Family(
            "DiT (diffusers)",
            dit,
            noisy_labelled_images,
            # The model calls the embeddings in its first block by themselves, too.
            ("BasicTransformerBlock", "CombinedTimestepLabelEmbeddings"),
            ("transformer_blocks",),
        ),
        Family(
            "nn.Transformer",
            transformer,
            sequences,
            ("TransformerEncoderLayer", "TransformerDecoderLayer"),
            ("encoder.layers", "decoder.layers"),
        ),
        Family("MLP-Mixer (timm)", mixer, small_images, ("MixerBlock",), ("blocks",)),
        Family("ResNet (torchvision)", resnet18, bare_images, ("BasicBlock",), ("layer1",)),
    )
}

# ---------------------------------------------------------------- training


def _perturbed(build: Callable[[], nn.Module]) -> nn.Module:
    """A model without zeros and ones in place of biases and scales, which hide what is wrong."""
    model = build()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.05 * torch.randn(param.shape).to(param.dtype))
    return model


@dataclass(frozen=True)
class RealTask:
    """See ``test.common.training.Task``.

    Args:
        family: name of the model.
        size: wrap by size, from so many elements on, instead of layer by layer.
        remat: rematerialize what the policy selects.
        scan: run the containers of layers as loops.
        options: of every unit.
        tolerance: largest error allowed, relative to the largest value of a tensor.
    """

    family: str
    size: int = 0
    remat: bool = False
    scan: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 2e-5
    steps: int = 3

    def build(self) -> nn.Module:
        model: Any = make(partial(_perturbed, FAMILIES[self.family].build))
        if (self.remat or self.scan) and hasattr(getattr(model, "config", None), "get_text_config"):
            for config in (model.config, model.config.get_text_config()):
                config.use_cache = False  # as transformers does for gradient checkpointing
        return model

    def shard(self, model: nn.Module) -> Any:
        family, options = FAMILIES[self.family], dict(self.options)
        policy: Callable[..., bool] = partial(size_based_auto_wrap_policy, min_num_params=self.size)
        if not self.size:
            layers = {
                type(each) for each in model.modules() if type(each).__name__ in family.layers
            }
            policy = partial(transformer_auto_wrap_policy, transformer_layer_cls=layers)
        if self.scan:
            options["scan_layers"] = list(family.containers)
        wrapper = remat_inside if self.remat else None
        return fsdp(model, auto_wrap_policy=policy, auto_wrapper_callable=wrapper, **options)

    def batch(self, step: int, rank: int) -> Batch:
        return FAMILIES[self.family].inputs(torch.Generator().manual_seed(100 * step + rank))

    def loss(self, output: Any) -> Tensor:
        if getattr(output, "loss", None) is not None:
            return output.loss
        if isinstance(output, Tensor) and output.dim() == 2:
            target = torch.arange(ROWS, device=output.device) % LABELS
            return nn.functional.cross_entropy(output, target)
        if hasattr(output, "logits_per_text"):  # it pairs a batch
            logits = output.logits_per_text
            target = torch.arange(ROWS, device=logits.device)
            return nn.functional.cross_entropy(logits, target)
        values = [output] if isinstance(output, Tensor) else list(output.values())
        values = [each.float() if each.dtype == torch.bfloat16 else each for each in values]
        return torch.stack([each.square().mean() for each in values]).sum()

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        # Where a gradient is zero but for rounding (a bias of attention's keys), the usual eps
        # would make steps of full size out of nothing.
        return torch.optim.AdamW(params, lr=3e-3, weight_decay=0.1, eps=1e-3)
