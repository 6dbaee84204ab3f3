"""What a dump holds (docs/dumps.md, "The points"): names in the order of the pass, layouts, axes, and which are choices."""

GLOBAL = ("embed", "final_norm", "logits")
INDEXER = ("attn.index_q", "attn.index_k", "attn.index_weights", "attn.index_scores", "attn.index_topk")
EXPERTS = ("ffn.router_logits", "ffn.choice_scores", "ffn.expert_ids", "ffn.expert_weights")
ADDENDS = ("ffn.routed", "ffn.shared")
LAYER = (
    ("input", "attn.norm", "attn.q_a", "attn.q_a_norm", "attn.q_raw", "attn.q", "attn.kv_a", "attn.kv_latent")
    + ("attn.k_rope", "attn.q_absorbed") + INDEXER + ("attn.latent", "attn.context", "attn.out", "residual", "ffn.norm")
    + EXPERTS + ("ffn.hidden",) + ADDENDS + ("ffn.out", "output")
)

# The axis of a token's row that is cut over the ranks. What is not here is the same on every rank, or an addend.
SHARDED = {"attn.q_raw": 0, "attn.q": 0, "attn.q_absorbed": 0, "attn.latent": 0, "attn.context": 0, "ffn.hidden": 1}
SHARDED["logits"] = 0
CHOICES = ("ffn.expert_ids", "attn.index_topk")
# Choices are written as integers, all else as F32; `stored` says which of these the engine had.
STORED = {"torch.float32": "f32", "torch.bfloat16": "bf16", "torch.float16": "f16"}


def short(name):
    """The point of a full name: `attn.q_a` of `layers.3.attn.q_a`."""
    return name.split(".", 2)[2] if name.startswith("layers.") else name


def layout(point):
    """The entry's `layout`, with its `axis` where it has one."""
    if point in SHARDED:
        return {"layout": "sharded", "axis": SHARDED[point]}
    return {"layout": "partial" if point in ADDENDS else "replicated"}


def of_layer(experts, indexer):
    """The points that a layer has: of experts or dense, with its own indexer or with another layer's choice."""
    return [
        point
        for point in LAYER
        if (experts or point not in EXPERTS + ADDENDS) and (indexer or point not in INDEXER)
    ]


def row_shape(config, point, experts):
    """Axes of a token's row where it has two: the last one's width."""
    return {
        "attn.q_raw": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attn.q": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attn.q_absorbed": config.kv_lora_rank,
        "attn.latent": config.kv_lora_rank,
        "attn.index_q": getattr(config, "index_head_dim", None),
        "ffn.hidden": None if experts else -1,
    }.get(point)
