"""Models of transformers, made from their configuration classes: tiny, and with random weights."""

import inspect
import os
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from tests.zoo.case import Case

from .loss import mean_of_squares

# Before transformers is imported: nothing is to be fetched.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROWS = 4
TOKENS = 16
VOCABULARY = 99
PIXELS = 32

# The names of sizes in configurations. Each configuration gets the sizes that it has.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "d_ff", "n_inner", "ffn_dim", "hidden_dim"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 4),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    "num_key_value_heads": 2,
    "head_dim": 8,
    "d_kv": 8,
    "rotary_dim": 4,
    "attention_hidden_size": 32,
    "vocab_size": VOCABULARY,
    "image_size": PIXELS,
    "patch_size": 8,
    "num_channels": 3,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "v_head_dim"), 8),
    "qk_nope_head_dim": 8,
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    "state_size": 8,
    "time_step_rank": 4,
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "activation_dropout"), 0.0),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    **dict.fromkeys(("dropout", "dropout_rate", "embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0),
    **dict.fromkeys(("layerdrop", "encoder_layerdrop", "decoder_layerdrop"), 0.0),
    "drop_path_rate": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
    "use_cache": False,
    # The masks of SpecAugment are numpy's random numbers.
    "apply_spec_augment": False,
    # Otherwise a forward of few tokens puts other modules into the model.
    "attention_type": "original_full",
    "attn_implementation": "eager",
}

# Model types, as transformers' AutoModel names them.
TYPES = """
afmoe aimv2_vision_model albert apertus arcee aria_text bailing_hybrid bart beam beit bert
bert-generation big_bird bigbird_pegasus biogpt bitnet blenderbot blenderbot-small bloom camembert
canine chinese_clip_vision_model clip_text_model clip_vision_model codegen cohere cohere2
cohere2_moe convbert ctrl cwm data2vec-text data2vec-vision deberta deberta-v2 deepseek_v4 deit
diffllama dinov2 dinov2_with_registers dinov3_vit distilbert doge dpr electra
embedding_gemma2_text ernie ernie4_5 ernie4_5_moe eurobert exaone4 exaone_moe falcon falcon_mamba
flex_olmo flint fnet gemma gemma2 gemma3_text gemma4_unified_text glm glm4 glm4_moe gpt-sw3 gpt2
gpt_bigcode gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_docling_text granite_swa
granitemoe granitemoe_swa granitemoeshared gte helium higgs_audio_v2 hrm_text hunyuan_v1_dense
hunyuan_v1_moe hy_v3 hy_v4 hyperclovax ibert ijepa imagegpt inkling2_text inkling_text internlm3
internvl_vision iquestcoder jais2 jamba jetmoe jina_embeddings_v3 kolibri1 laguna layoutlm led
lfm2 lfm3 llama llama4_text longformer longt5 m2m_100 mamba marian markuplm mbart megatron-bert
mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral
mlcd mlcd_vision_model mobilebert mobilenet_v2 modernbert modernbert-decoder molmo2_text mpnet mra
mt5 muse_glimmer_text mvp nanochat nemotron nemotron_h nllb-moe nomic_bert nystromformer olmo
olmo2 olmo3 olmo_hybrid olmoe openai-gpt openai_privacy_filter opt pegasus pegasus_x persimmon phi
phi3 phimoe pixio pixtral plbart prophetnet qianfan_ocr_vision qwen2 qwen2_moe qwen3
qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen3_vl_moe_text qwen3_vl_text radio
recurrent_gemma rembert roberta roberta-prelayernorm roformer rwkv sam3_vit_model
sam_hq_vision_model sam_vision_model seed_oss sew sew-d siglip_vision_model smollm3 solar_open
splinter squeezebert stablelm starcoder2 switch_transformers t5 tapas tipsv2_text_model
tipsv2_vision_model ultrabert umt5 vaultgemma visual_bert vit vit_mae vit_msn vitdet xglm
xlm-roberta xlm-roberta-xl xlnet xlstm yoso
"""


def _case(model_type: str) -> Case:
    transformers = import_module("transformers")
    auto = "transformers.models.auto"
    transformers.logging.set_verbosity_error()
    configs = import_module(f"{auto}.configuration_auto").CONFIG_MAPPING_NAMES
    names = import_module(f"{auto}.modeling_auto").MODEL_MAPPING_NAMES[model_type]
    config_class = getattr(transformers, configs[model_type])
    model_class = getattr(transformers, names if isinstance(names, str) else names[0])
    config = config_class(**{k: SMALL[k] for k in _fields(config_class) & SMALL.keys()})
    model = model_class(config).train()
    parameters = inspect.signature(model.forward).parameters
    return Case(
        _without_dropout(model),
        (),
        mean_of_squares,
        kwargs=_inputs(model.main_input_name, set(parameters)),
        rows=ROWS,
    )


def _fields(config_class: type) -> set[str]:
    found = {"use_cache", "attn_implementation"}
    for base in config_class.__mro__:
        found |= set(inspect.get_annotations(base))
        if "__init__" in vars(base):
            found |= set(inspect.signature(vars(base)["__init__"]).parameters)
    return found


def _inputs(main: str, parameters: set[str]) -> dict[str, Any]:
    if main == "pixel_values":
        return {main: torch.randn(ROWS, 3, PIXELS, PIXELS)}
    if main == "input_values":
        return {main: torch.randn(ROWS, 4000)}
    ids = torch.randint(3, VOCABULARY - 9, (ROWS, TOKENS))
    found: dict[str, Any] = {main: ids}
    if "decoder_input_ids" in parameters:
        found["decoder_input_ids"] = ids[:, : TOKENS // 2]
    if "use_cache" in parameters:
        found["use_cache"] = False
    return found


def _without_dropout(model: nn.Module) -> nn.Module:
    """The model without dropout, under any of the configurations' names for it."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return model


CASES = {f"transformers {name}": partial(_case, name) for name in TYPES.split()}
