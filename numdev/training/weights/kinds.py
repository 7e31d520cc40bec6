"""What a weight is, by its name: which layer it is in, and what kind of parameter it is, by the
habits of GPT-2, Llama, BERT, T5, ViT, CLIP, timm and `nn.Transformer`. The kind only groups rows.
"""

from __future__ import annotations

import re

_ATTENTIONS = tuple(f"attention {name}" for name in ("q", "k", "v", "qkv", "o"))
KINDS = ("embedding", *_ATTENTIONS, "mlp", "norm", "head", "other")  # in the order shown

_LEAF = re.compile(r"(?:weight|bias|gamma|beta|running_mean|running_var)$")
_NORM = re.compile(r"norm|layrnorm|^ln(_|\d|$)|^bn\d*$", re.IGNORECASE)
_ATTENTION = r"\w*(?:attn|attention|mha)\w*"
_RULES = tuple(
    (kind, re.compile(rf"(?:^|\.)(?:{pattern})(?:\.|$)", re.IGNORECASE))
    for kind, pattern in (
        # Before the embeddings, for embed_out, and before attention, for heads that have a proj.
        ("head", r"lm_head|embed_out|classifier|classification_head|score|qa_outputs|proj_out"),
        ("head", r"output_projection|head|head_dist|pre_logits"),
        ("other", r"inv_freq|rotary\w*"),
        ("embedding", r"\w*embed\w*|wte|wpe|tok_embd|pos_embd|cls_token|mask_token|dist_token"),
        ("embedding", r"reg_token|shared|relative_attention_bias|relative_position_bias_table"),
        ("attention qkv", r"c_attn|qkv|qkv_proj|to_qkv|query_key_value|wqkv|in_proj\w*"),
        ("attention q", r"q_proj\w*|query|query_proj|wq|to_q|q_lin|q_a_proj|q_b_proj|q"),
        ("attention k", r"k_proj\w*|key|key_proj|wk|to_k|k_lin|k"),
        ("attention v", r"v_proj\w*|value|value_proj|wv|to_v|v_lin|v"),
        ("attention o", r"o_proj|out_proj|to_out|out_lin"),
        ("attention o", rf"{_ATTENTION}\.(?:c_proj|proj|dense|output\.dense|o|wo|out)"),
        ("mlp", r"\w*mlp\w*|ffn?|feed_forward|feedforward|densereludense|\w*experts?|moe\w*"),
        ("mlp", r"\w*_moe|fc\d?|c_fc|w[123]|gate_proj|up_proj|down_proj|gate_up_proj|linear[12]"),
        ("mlp", r"lin[12]|intermediate|output\.dense|dense_h_to_4h|dense_4h_to_h"),
    )
)
# Whole names: a Llama from Meta's own files, and BERT's heads, whose parts mean other things within
# a layer.
_HEAD = re.compile(r"output\.weight|cls\.(predictions|seq_relationship)\..*")
_NUMBERED = re.compile(r"^(.*?(?:^|\.)\d+)\.")


def kind_of(name: str) -> str:
    """The kind of parameter, one of KINDS."""
    parts = name.split(".")
    module = parts[-2] if len(parts) > 1 and _LEAF.match(parts[-1]) else parts[-1]
    if _NORM.search(module):
        return "norm"
    if _HEAD.fullmatch(name):
        return "head"
    return next((kind for kind, rule in _RULES if rule.search(name)), "other")


def layer_of(name: str) -> str | None:
    """The name up to its first number, `model.layers.0`; None where it has none."""
    found = _NUMBERED.match(name)
    return found[1] if found else None
