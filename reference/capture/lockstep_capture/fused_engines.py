"""Where vLLM and SGLang have their values: module trees after DeepSeek-V2's, of which both have GLM-5 as a subclass.

Read in vllm-project/vllm 002d6073 (vllm/model_executor/models/deepseek_v2.py, layers/mla.py) and sgl-project/sglang
00114aef and 005e8bf8 (python/sglang/srt/models/deepseek_v2.py, layers/attention/nsa/nsa_indexer.py). Neither runs in this
project's tests, which have small trees with the same names and habits in their place.

The habits: the residual is kept apart and added by the next norm, in place, so a layer's output is what that norm
gives back, and `attn.out` and `ffn.out` are what it adds: reduced over ranks in both engines, whoever reduces. q_a and
kv_a are one product, gate and up as well. Rotation is a module that layers share and may write in place; its values stand
where the unrotated ones stood, so nothing is put in another order here. A module's output is often a tuple.
"""

import sys

import torch

from .capture import CaptureError, eps, usual
from .transformers_engine import first

ASK_FOR_LOGITS = "the engine made logits of the rows that it samples: ask for logprobs of the prompt, or do without"


def child(module, *names):
    """The first of these submodules that there is, or None; a name may be a path."""
    for name in names:
        found = module
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is not None:
            return found
    return None


class Fused:
    MISSING = {
        "attn.q": "rotation is fused into another kernel: choose an attention backend that calls rotary_emb",
        "attn.k_rope": "rotation is fused into another kernel: choose an attention backend that calls rotary_emb",
        "attn.q_absorbed": "inside the attention backend: nothing to add",
        "attn.latent": "inside the attention backend: nothing to add",
        "attn.index_q": "rotated and quantised by one kernel: nothing to add, unless the engine can run it unfused",
        "attn.index_scores": "inside the indexer's kernel: nothing to add",
        "attn.index_topk": "the indexer gave no indices that count from the prompt's first token",
        "ffn.choice_scores": "inside the router's kernel: nothing to add",
        "ffn.expert_ids": "inside the experts' kernel: choose a backend that calls select_experts",
        "ffn.expert_weights": "inside the experts' kernel: choose a backend that calls select_experts",
        "ffn.hidden": "inside the experts' kernel: nothing to add",
        "ffn.routed": "the experts' module adds the shared ones itself: nothing to add",
        "ffn.shared": "the shared experts run inside the experts' kernel: switch their fusion off",
        "logits": ASK_FOR_LOGITS,
    }

    def __init__(self, capture):
        self.c, self.config = capture, capture.config
        c, body = capture, capture.body
        c.hook(body.embed_tokens, after=lambda _m, _a, _k, out: c.keep(None, "embed", out))
        if (processor := getattr(c.model, "logits_processor", None)) is not None:
            c.hook(processor, after=self._logits, behind=True)
        last = max(c.modules)
        self._stream(body.norm, before=(last, "ffn.out"), stream=[(last, "output")], norm=(None, "final_norm"))
        for n, layer in c.modules.items():
            self._stream(
                layer.input_layernorm,
                before=(n - 1, "ffn.out"),
                stream=[(n - 1, "output"), (n, "input")],
                norm=(n, "attn.norm"),
            )
            self._stream(
                layer.post_attention_layernorm,
                before=(n, "attn.out"),
                stream=[(n, "residual")],
                norm=(n, "ffn.norm"),
            )
            self._attention(n, layer.self_attn)
            if self.experts(n):
                self._experts(n, layer.mlp)
            else:
                c.hook(layer.mlp.down_proj, lambda _m, a, _k, n=n: c.keep(n, "ffn.hidden", a[0], a[0].shape[-1]))
        turning = {child(layer.self_attn, "rotary_emb") for layer in c.modules.values()}
        turning |= {child(layer.self_attn, "indexer_rope_emb", "indexer.rotary_emb") for layer in c.modules.values()}
        for module in turning - {None}:
            c.hook(module, after=self._rotated)

    # -- what the capture asks -------------------------------------------------------------------------------------

    def indexer(self, n):
        return getattr(self.c.modules[n].self_attn, "indexer", None)

    def experts(self, n):
        return hasattr(self.c.modules[n].mlp, "gate")

    def version(self):
        return getattr(sys.modules.get(self.name), "__version__", "unknown")

    def dtype(self):
        return next(v.dtype for name, v in self.c.values.items() if v.is_floating_point())

    def settings(self):
        layers = list(self.c.modules.values())
        norms = [m for layer in layers for m in (layer.input_layernorm, layer.post_attention_layernorm)]
        latents = [m for layer in layers for m in (layer.self_attn.q_a_layernorm, layer.self_attn.kv_a_layernorm)]
        indexers = [self.indexer(n).k_norm for n in self.c.modules if self.indexer(n) is not None]
        found = {"rms_eps": norms, "latent_eps": latents, "index_eps": indexers}
        return {k: usual(map(eps, v)) for k, v in found.items() if usual(map(eps, v)) is not None}

    def finish(self):
        """Experts best first, by the scores that they are chosen by."""
        c = self.c
        for n in filter(self.experts, c.modules):
            logits, ids = c.get(n, "ffn.router_logits"), c.get(n, "ffn.expert_ids")
            if logits is None or ids is None:
                continue
            gate = c.modules[n].mlp.gate
            bias = getattr(gate, "e_score_correction_bias", None)
            scores = logits.float().sigmoid() + (0 if bias is None else bias.detach().float().cpu())
            order = scores.gather(1, ids.long()).argsort(dim=-1, descending=True, stable=True)
            for point in ("ffn.expert_ids", "ffn.expert_weights"):
                if (value := c.get(n, point)) is not None:
                    c.values[f"layers.{n}.{point}"] = value.gather(1, order)

    # -- values ------------------------------------------------------------------------------------------------------

    def _stream(self, module, before, stream, norm):
        """A norm of (x) or of (x, residual): the second adds both first, and gives the sum back."""
        c = self.c

        def keep(place, value):
            # Layer -1 is before the first, whose norm has nothing to add.
            if place[0] is None or place[0] >= 0:
                c.keep(*place, value)

        def begin(_module, args, kwargs):
            values = [*args, *kwargs.values()]
            if len(values) > 1 and values[1] is not None:
                keep(before, values[0])
            else:
                for place in stream:
                    keep(place, values[0])

        def end(_module, _args, _kwargs, out):
            keep(norm, first(out))
            if isinstance(out, (tuple, list)):
                for place in stream:
                    keep(place, out[1])

        c.hook(module, begin, end)

    def _attention(self, n, module):
        c, config = self.c, self.config
        width, rope = config.qk_nope_head_dim + config.qk_rope_head_dim, config.qk_rope_head_dim

        def latents(_module, _args, _kwargs, out):
            q, kv = first(out).split([config.q_lora_rank, config.kv_lora_rank + rope], dim=-1)
            c.keep(n, "attn.q_a", q)
            c.keep(n, "attn.kv_a", kv)

        def plain(point, module, width=None):
            if module is not None:
                c.hook(module, after=lambda _m, _a, _k, out: c.keep(n, point, first(out), width))

        if (fused := child(module, "fused_qkv_a_proj", "fused_qkv_a_proj_with_mqa")) is not None:
            c.hook(fused, after=latents)
        else:
            plain("attn.q_a", child(module, "q_a_proj"))
            plain("attn.kv_a", child(module, "kv_a_proj_with_mqa"))
        plain("attn.q_a_norm", module.q_a_layernorm)
        plain("attn.q_raw", module.q_b_proj, width)
        plain("attn.kv_latent", module.kv_a_layernorm)
        c.hook(module.o_proj, lambda _m, a, _k: c.keep(n, "attn.context", a[0]))

        def turned(call, args, _kwargs, result):
            raw = c.get(n, "attn.q_raw")
            if call != "rotated" or raw is None:
                return
            query, key = result[0], result[1]
            c.keep(n, "attn.k_rope", key.reshape(len(c.ids), -1))
            query = c.rows("attn.q", query.reshape(len(c.ids), -1)).reshape(len(c.ids), -1, rope)
            c.keep(n, "attn.q", torch.cat((raw[..., : width - rope], query), dim=-1), width)

        c.watched(module, turned)
        self._absorbed(n, module)
        if self.indexer(n) is not None:
            self._indexer(n, module.indexer)

    def _absorbed(self, n, module):
        """Where the engine shows the absorbed form."""

    def _rotated(self, _module, args, kwargs, out):
        positions = args[0] if args else kwargs["positions"]
        if self.c.positions is None:
            self.c.seen_positions(positions)
        if self.c.stack:
            self.c.stack[-1]("rotated", args, kwargs, out)

    def _indexer(self, n, module):
        c, config = self.c, self.config
        heads, width, rope = config.index_n_heads, config.index_head_dim, config.qk_rope_head_dim
        plain = {}

        def weights(value):
            scale = heads**-0.5 * width**-0.5
            c.keep(n, "attn.index_weights", value.detach().float() * scale)

        c.hook(module.wq_b, after=lambda _m, _a, _k, out: plain.update(q=c.rows("attn.index_q", first(out))))
        c.hook(module.k_norm, after=lambda _m, _a, _k, out: plain.update(k=c.rows("attn.index_k", first(out))))
        if (both := child(module, "wk_weights_proj")) is not None:
            c.hook(both, after=lambda _m, _a, _k, out: weights(first(out)[..., width:]))
        elif (alone := child(module, "weights_proj")) is not None:
            c.hook(alone, after=lambda _m, _a, _k, out: weights(first(out)))

        def see(call, args, _kwargs, result):
            rows = len(c.ids)
            if call == "rotated":
                query, key = (c.rows("attn.index_q", r.reshape(rows, -1)) for r in result[:2])
                if query.shape[-1] == heads * rope and "q" in plain:  # else a stand-in: the kernel rotates the query
                    whole = plain["q"].reshape(rows, heads, width)
                    query = torch.cat((query.reshape(rows, heads, rope), whole[..., rope:]), dim=-1)
                    c.keep(n, "attn.index_q", query, width)
                if "k" in plain:
                    c.keep(n, "attn.index_k", torch.cat((key, plain["k"][..., rope:]), dim=-1))
            elif call == "topk" and args[0].shape[-1] == rows:
                c.keep(n, "attn.index_scores", args[0])

        c.watched(module, see)
        c.hook(module, after=lambda _m, _a, _k, out: self._chosen(n, module, first(out)))

    def _chosen(self, n, module, out):
        """Indices are kept only if they can be the prompt's own: engines turn them into places of a cache, or leave them
        unwritten where every key is chosen anyhow."""
        c, rows = self.c, len(self.c.ids)
        buffer = getattr(module, "topk_indices_buffer", None)
        chosen = buffer[:rows] if buffer is not None else out
        if not isinstance(chosen, torch.Tensor) or chosen.dim() != 2 or chosen.shape[0] != rows:
            return
        chosen = chosen.detach().cpu()
        limit = torch.arange(rows).unsqueeze(-1)
        valid = (chosen >= 0) & (chosen <= limit)
        expected = (limit + 1).clamp(max=self.config.index_topk).squeeze(-1)
        distinct = [len(row[ok].unique()) for row, ok in zip(chosen, valid)]
        if torch.equal(valid.sum(-1), expected) and distinct == expected.tolist():
            c.keep(n, "attn.index_topk", chosen.to(torch.int32))

    def _experts(self, n, mlp):
        c = self.c
        c.hook(mlp.gate, after=lambda _m, _a, _k, out: c.keep(n, "ffn.router_logits", first(out)))
        if (shared := child(mlp, "shared_experts")) is not None:
            if c.tp > 1 and getattr(shared.down_proj, "reduce_results", False):
                c.note("ffn.shared", "summed over ranks inside of the module: a rank's addend is not to be had")
            else:
                c.hook(shared, after=lambda _m, _a, _k, out: c.keep(n, "ffn.shared", first(out)))
        if (topk := child(mlp, "topk")) is not None:
            c.hook(topk, after=lambda _m, _a, _k, out: self._choice(n, out))
        for owner in (child(mlp, "experts.router"), child(mlp, "experts")):
            if hasattr(owner, "select_experts"):
                self._select(n, owner)

    def _select(self, n, owner):
        function = owner.select_experts

        def select(*args, **kwargs):
            out = function(*args, **kwargs)
            self._choice(n, out)
            return out

        self.c.replace(owner, "select_experts", select)

    def _choice(self, n, out):
        """(weights, ids, ..), by name or by place."""
        c, used = self.c, self.config.num_experts_per_tok
        weights = getattr(out, "topk_weights", None)
        weights, ids = (out[0], out[1]) if weights is None else (weights, out.topk_ids)
        if ids.shape[-1] != used:
            for point in ("ffn.expert_ids", "ffn.expert_weights"):
                c.note(point, f"{ids.shape[-1]} experts where {used} are used: switch the shared expert's fusion off")
            return
        c.keep(n, "ffn.expert_ids", ids.to(torch.int32))
        factor = getattr(self.config, "routed_scaling_factor", 1.0)
        one = (weights.detach().float().sum(-1) - 1).abs().max() < 1e-2
        if factor != 1 and getattr(self.config, "norm_topk_prob", True) and one:
            text = "the engine scales the experts' sum, not their weights: nothing to add"
            c.note("ffn.expert_weights", text)
            c.note("ffn.routed", text)
            c.values.pop(f"layers.{n}.ffn.routed", None)
        else:
            c.keep(n, "ffn.expert_weights", weights)

    def _logits(self, _module, _args, _kwargs, out):
        c = self.c
        logits = next((getattr(out, a) for a in ("full_logits", "next_token_logits") if getattr(out, a, None) is not None), out)
        if not isinstance(logits, torch.Tensor) or logits.shape[0] != len(c.ids):
            c.note("logits", ASK_FOR_LOGITS)
            return
        if logits.shape[-1] >= self.config.vocab_size:
            logits = c.part_of_logits(logits, self.config.vocab_size)
        c.keep(None, "logits", logits)


class Vllm(Fused):
    name = "vllm"

    @staticmethod
    def fits(model):
        return any(hasattr(m, "mla_attn") and hasattr(m, "fused_qkv_a_proj") for m in model.modules())

    def finish(self):
        if self.dtype() == torch.float16:
            raise CaptureError("vLLM scales the residual stream in float16: run in bfloat16 or float32")
        super().finish()


class Sglang(Fused):
    name = "sglang"

    @staticmethod
    def fits(model):
        return any(hasattr(m, "attn_mqa") for m in model.modules())

    def _experts(self, n, mlp):
        super()._experts(n, mlp)
        # Routed experts alone, not reduced: the module around them adds the shared ones.
        self.c.hook(mlp.experts, after=lambda _m, _a, _k, out: self._routed(n, first(out)))

    def _routed(self, n, value):
        if "ffn.routed" not in self.c.notes:
            self.c.keep(n, "ffn.routed", value)

    def _absorbed(self, n, module):
        c, width = self.c, self.config.kv_lora_rank

        def begin(_module, args, kwargs):
            # Backends that take the rotated part by itself get the absorbed query alone, others both in one.
            query = args[0].reshape(len(c.ids), module.num_local_heads, -1)
            c.keep(n, "attn.q_absorbed", query[..., :width], width)

        c.hook(module.attn_mqa, begin, lambda _m, _a, _k, out: c.keep(n, "attn.latent", first(out), width))
