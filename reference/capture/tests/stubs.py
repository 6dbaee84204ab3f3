"""Small module trees with the names and habits of vLLM's and SGLang's GLM-5, for tests of the hooks. torch only.

The arithmetic is a model's, on random weights, so that tests can recompute it. The habits that matter: norms add the
residual and write both of their arguments; linear modules return tuples; rotation is one module for all layers and
writes in place; the experts are one fused module; gate and up, and q_a and kv_a, are one product each. Names were read in
vllm-project/vllm 002d6073 and sgl-project/sglang 00114aef.
"""

import types

import torch
from torch import nn
from torch.nn import functional as F

CONFIG = dict(
    hidden_size=32, q_lora_rank=16, kv_lora_rank=24, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10,
    num_attention_heads=4, index_n_heads=2, index_head_dim=16, index_topk=6, n_routed_experts=4,
    num_experts_per_tok=2, moe_intermediate_size=20, intermediate_size=28, routed_scaling_factor=2.5,
    norm_topk_prob=True, vocab_size=128, rms_norm_eps=1e-5,
)  # fmt: skip


def config():
    return types.SimpleNamespace(**CONFIG)


class Linear(nn.Module):
    """A linear module of either engine: (output, bias)."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)

    def forward(self, x):
        return F.linear(x, self.weight), None


class RowParallel(Linear):
    reduce_results = False


class RMSNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(1 + torch.randn(width) / 8)
        self.variance_epsilon = eps

    def norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon) * self.weight

    def forward(self, x, residual=None):
        if residual is None:
            return self.norm(x)
        residual.add_(x)
        x.copy_(self.norm(residual))
        return x, residual


class Rotary(nn.Module):
    """Adjacent pairs, written in place."""

    is_neox_style = False

    def forward(self, positions, query, key):
        width = query.shape[-1]
        angle = positions[:, None] * 1e4 ** (-torch.arange(0, width, 2) / width)
        for x in (query, key):
            cos, sin = angle.cos(), angle.sin()
            if x.dim() == 3:
                cos, sin = cos[:, None], sin[:, None]
            a, b = x[..., 0::2].clone(), x[..., 1::2].clone()
            x[..., 0::2], x[..., 1::2] = a * cos - b * sin, b * cos + a * sin
        return query, key


class SiluAndMul(nn.Module):
    def forward(self, x):
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up


class MLP(nn.Module):
    def __init__(self, c, width):
        super().__init__()
        self.gate_up_proj, self.down_proj = Linear(c.hidden_size, 2 * width), RowParallel(width, c.hidden_size)
        self.act_fn = SiluAndMul()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_up_proj(x)[0]))[0]


class Gate(Linear):
    def __init__(self, c, pair):
        super().__init__(c.hidden_size, c.n_routed_experts)
        self.e_score_correction_bias = nn.Parameter(torch.randn(c.n_routed_experts) / 8)
        self.pair = pair

    def forward(self, x):
        out = super().forward(x)
        return out if self.pair else out[0]


def choose(c, gate, logits):
    scores = logits.float().sigmoid()
    ids = (scores + gate.e_score_correction_bias).topk(c.num_experts_per_tok, sorted=False).indices.flip(-1)
    weights = scores.gather(1, ids)
    return weights / weights.sum(-1, keepdim=True) * c.routed_scaling_factor, ids.to(torch.int32)


class FusedMoE(nn.Module):
    """All experts in one: vLLM's chooses by itself and adds the shared ones, SGLang's is told the choice."""

    def __init__(self, c, gate=None, shared=None):
        super().__init__()
        self.c, self.w13 = c, nn.Parameter(torch.randn(c.n_routed_experts, 2 * c.moe_intermediate_size, c.hidden_size) / 6)
        self.w2 = nn.Parameter(torch.randn(c.n_routed_experts, c.hidden_size, c.moe_intermediate_size) / 5)
        self.inside = (gate, shared)

    def select_experts(self, x, logits):
        return choose(self.c, self.inside[0], logits)

    def routed(self, x, weights, ids):
        hidden = SiluAndMul()(torch.einsum("th,tkwh->tkw", x, self.w13[ids.long()]))
        return torch.einsum("tkw,tkhw,tk->th", hidden, self.w2[ids.long()], weights.to(hidden.dtype))

    def forward(self, hidden_states, topk_output=None):
        if topk_output is not None:
            return self.routed(hidden_states, *topk_output[:2])
        gate, shared = self.inside
        logits = gate(hidden_states)[0]
        return self.routed(hidden_states, *self.select_experts(hidden_states, logits)) + shared(hidden_states)


class TopK(nn.Module):
    def __init__(self, c, gate):
        super().__init__()
        self.c, self.inside = c, (gate,)

    def forward(self, hidden_states, router_logits):
        weights, ids = choose(self.c, self.inside[0], router_logits)
        return types.SimpleNamespace(topk_weights=weights, topk_ids=ids, router_logits=router_logits)


class VllmMoE(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate, self.shared_experts = Gate(c, True), MLP(c, c.moe_intermediate_size)
        self.experts = FusedMoE(c, self.gate, self.shared_experts)

    def forward(self, x):
        return self.experts(hidden_states=x)


class SglangMoE(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate, self.shared_experts = Gate(c, False), MLP(c, c.moe_intermediate_size)
        self.experts, self.topk = FusedMoE(c), TopK(c, self.gate)

    def forward(self, x):
        shared = self.shared_experts(x)
        chosen = self.topk(x, self.gate(x))
        out = self.experts(x, (chosen.topk_weights, chosen.topk_ids))
        out += shared  # in place: what was kept of the routed sum must not move
        return out


class Indexer(nn.Module):
    def __init__(self, c, fused):
        super().__init__()
        self.c, self.fused = c, fused
        self.wq_b = Linear(c.q_lora_rank, c.index_n_heads * c.index_head_dim)
        if fused:
            self.wk_weights_proj = Linear(c.hidden_size, c.index_head_dim + c.index_n_heads)
            self.topk_indices_buffer = torch.zeros(64, c.index_topk, dtype=torch.int32)
        else:
            self.wk, self.weights_proj = Linear(c.hidden_size, c.index_head_dim), Linear(c.hidden_size, c.index_n_heads)
        self.k_norm = nn.LayerNorm(c.index_head_dim, eps=1e-6)
        nn.init.normal_(self.k_norm.bias)

    def forward(self, x, q_lora, positions, rotary):
        c, rope = self.c, self.c.qk_rope_head_dim
        q = self.wq_b(q_lora)[0].view(-1, c.index_n_heads, c.index_head_dim)
        if self.fused:
            k, weights = self.wk_weights_proj(x)[0].split([c.index_head_dim, c.index_n_heads], -1)
        else:
            k, weights = self.wk(x)[0], self.weights_proj(x)[0]
        k = self.k_norm(k)
        q_pe, k_pe = rotary(positions, q[..., :rope].clone(), k[:, None, :rope].clone())
        q, k = torch.cat((q_pe, q[..., rope:]), -1), torch.cat((k_pe[:, 0], k[..., rope:]), -1)
        weights = weights * c.index_n_heads**-0.5 * c.index_head_dim**-0.5
        scores = torch.einsum("thd,ud->thu", q, k).relu().mul(weights[..., None]).sum(1)
        self.kept = q, k, weights
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
        chosen = scores.topk(min(c.index_topk, len(x))).indices.to(torch.int32)
        chosen = chosen.masked_fill(chosen > torch.arange(len(x))[:, None], -1)
        if not self.fused:
            return chosen
        self.topk_indices_buffer[: len(x)] = -1
        self.topk_indices_buffer[: len(x), : chosen.shape[1]] = chosen
        return self.topk_indices_buffer


def attend(q, k, v, chosen):
    """q and k [tokens, heads, width], v [tokens, heads, width]: attention over the chosen keys."""
    mask = torch.full((len(q), len(q) + 1), float("-inf"), dtype=q.dtype)
    mask.scatter_(1, torch.where(chosen < 0, len(q), chosen).long(), 0.0)
    scores = torch.einsum("thd,uhd->htu", q, k) * CONFIG["qk_nope_head_dim"] ** -0.5 + mask[:, :-1]
    return torch.einsum("htu,uhd->thd", scores.softmax(-1), v)


class Backend(nn.Module):
    """Attention's kernel: vLLM's MLAAttention, SGLang's RadixAttention."""

    def forward(self, q, k, v, chosen):
        return attend(q, k, v, chosen).flatten(1)


class Attention(nn.Module):
    def __init__(self, c, rotary, vllm):
        super().__init__()
        self.c, self.rotary_emb, self.num_local_heads = c, rotary, c.num_attention_heads
        both = Linear(c.hidden_size, c.q_lora_rank + c.kv_lora_rank + c.qk_rope_head_dim)
        self.q_a_layernorm, self.kv_a_layernorm = RMSNorm(c.q_lora_rank, 1e-5), RMSNorm(c.kv_lora_rank, 1e-5)
        self.q_b_proj = Linear(c.q_lora_rank, c.num_attention_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim))
        self.kv_b_proj = Linear(c.kv_lora_rank, c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim))
        self.o_proj = RowParallel(c.num_attention_heads * c.v_head_dim, c.hidden_size)
        self.indexer = Indexer(c, vllm)
        if vllm:
            self.fused_qkv_a_proj, self.mla_attn = both, Backend()
        else:
            self.fused_qkv_a_proj_with_mqa, self.attn_mqa = both, Backend()

    def forward(self, positions, x):
        c, heads, nope = self.c, self.c.num_attention_heads, self.c.qk_nope_head_dim
        fused = self.fused_qkv_a_proj if hasattr(self, "mla_attn") else self.fused_qkv_a_proj_with_mqa
        q_a, kv = fused(x)[0].split([c.q_lora_rank, c.kv_lora_rank + c.qk_rope_head_dim], -1)
        q_lora = self.q_a_layernorm(q_a)
        q = self.q_b_proj(q_lora)[0].view(-1, heads, nope + c.qk_rope_head_dim)
        latent, k_pe = self.kv_a_layernorm(kv[..., : c.kv_lora_rank]), kv[:, None, c.kv_lora_rank :]
        self.rotary_emb(positions, q[..., nope:], k_pe)  # in place, in the products' own memory
        chosen = self.indexer(x, q_lora, positions, self.rotary_emb)[: len(x)]
        w = self.kv_b_proj.weight.view(heads, -1, c.kv_lora_rank)
        if hasattr(self, "mla_attn"):
            keys = torch.cat((torch.einsum("hdl,tl->thd", w[:, :nope], latent), k_pe.expand(-1, heads, -1)), -1)
            out = self.mla_attn(q, keys, torch.einsum("hdl,tl->thd", w[:, nope:], latent), chosen)
        else:
            absorbed = torch.einsum("hdl,thd->thl", w[:, :nope], q[..., :nope])
            row = torch.cat((latent, k_pe[:, 0]), -1)[:, None].expand(-1, heads, -1)
            value = latent[:, None].expand(-1, heads, -1)
            out = self.attn_mqa(torch.cat((absorbed, q[..., nope:]), -1), row, value, chosen)
            out = torch.einsum("hdl,thl->thd", w[:, nope:], out.view(len(x), heads, -1)).flatten(1)
        return self.o_proj(out)[0]


class Layer(nn.Module):
    def __init__(self, c, n, rotary, vllm):
        super().__init__()
        self.self_attn = Attention(c, rotary, vllm)
        self.mlp = MLP(c, c.intermediate_size) if n == 0 else (VllmMoE if vllm else SglangMoE)(c)
        self.input_layernorm = RMSNorm(c.hidden_size, 1e-5)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, 1e-5)

    def forward(self, positions, x, residual):
        if residual is None:
            residual, x = x, self.input_layernorm(x)
        else:
            x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(positions, x)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class Body(nn.Module):
    def __init__(self, c, vllm):
        super().__init__()
        rotary = Rotary()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c, n, rotary, vllm) for n in range(3))
        self.norm = RMSNorm(c.hidden_size, 1e-5)

    def forward(self, input_ids, positions):
        x, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            x, residual = layer(positions, x, residual)
        return self.norm(x, residual)[0]


class Logits(nn.Module):
    """Gathers; `rows` is what the engine samples."""

    rows = slice(None)

    def forward(self, lm_head, hidden):
        return F.linear(hidden[self.rows], lm_head.weight)


class Model(nn.Module):
    """The tree of `engine`: vllm or sglang."""

    def __init__(self, engine):
        super().__init__()
        torch.manual_seed(0)
        self.config = config()
        self.model = Body(self.config, engine == "vllm")
        self.lm_head, self.logits_processor = Linear(self.config.hidden_size, self.config.vocab_size), Logits()

    @torch.no_grad()
    def forward(self, input_ids, positions):
        return self.logits_processor(self.lm_head, self.model(input_ids, positions))
