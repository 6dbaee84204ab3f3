"""The hooks on a small random GlmMoeDsa: `python -m unittest discover reference/capture/tests`."""

import json
import os
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.dirname(HERE)]
try:
    import torch
    import transformers
    from safetensors.torch import load_file
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    import lockstep_capture
except ImportError as missing:
    torch = None
    text = f"SKIPPED: {missing}; pip install torch safetensors transformers (with GlmMoeDsa)"
    print(f"\n{__file__}: {text}", file=sys.stderr)

N = 12
SMALL = dict(
    vocab_size=96, hidden_size=32, intermediate_size=40, moe_intermediate_size=24, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, first_k_dense_replace=1,
    kv_lora_rank=16, q_lora_rank=20, qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=20, index_topk=5,
    index_head_dim=16, index_n_heads=2, max_position_embeddings=64, pad_token_id=0, indexer_types=["full", "full", "shared"],
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
)  # fmt: skip


@unittest.skipIf(torch is None, "no transformers with GlmMoeDsa")
class Transformers(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.out = os.path.join(folder.name, "dump")
        torch.manual_seed(0)
        self.ids = torch.randint(1, SMALL["vocab_size"], (1, N))

    def model(self, dtype=None, **settings):
        torch.manual_seed(1)
        model = GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**SMALL, initializer_range=0.2)).eval()
        for layer in model.model.layers[1:]:
            torch.nn.init.normal_(layer.mlp.gate.e_score_correction_bias, std=0.1)
        for part, value in settings.items():
            setattr(model.config, f"_{part}_implementation", value)
        return model.to(dtype) if dtype else model

    def save(self, capture):
        with open(os.devnull, "w", encoding="utf-8") as sink:
            stderr, sys.stderr = sys.stderr, sink
            try:
                missing = capture.save(self.out)
            finally:
                sys.stderr = stderr
        with open(os.path.join(self.out, "dump.json"), encoding="utf-8") as f:
            return json.load(f), load_file(os.path.join(self.out, "rank0.safetensors")), missing

    def dump(self, model, ids=None, **call):
        ids = self.ids if ids is None else ids
        with torch.no_grad():
            plain = model(input_ids=ids, use_cache=False, **call).logits
            capture = lockstep_capture.attach(model)
            hooked = model(input_ids=ids, use_cache=False, **call).logits
        self.assertTrue(torch.equal(plain, hooked), "the hooks change the results")
        index, values, missing = self.save(capture)
        for module in model.modules():
            self.assertFalse(module._forward_hooks or module._forward_pre_hooks, "a hook was left")
        return index, values, missing

    def near(self, found, expected, name):
        self.assertTrue(torch.allclose(found, expected, rtol=1e-4, atol=1e-5), name)

    def test_every_point_fits_its_inputs(self):
        for settings in ({}, {"attn": "eager"}, {"experts": "eager"}, {"experts": "batched_mm"}):
            with self.subTest(**settings):
                self.setUp()
                model = self.model(**settings)
                index, v, missing = self.dump(model)
                self.assertEqual(len(missing), 1, missing)
                self.assertIn("attn.q_absorbed, attn.latent", missing[0])
                self.assertEqual(index["settings"]["latent_eps"], 1e-6)
                self.check(model, v)

    def check(self, model, v):
        f, c = torch.nn.functional.linear, model.config
        angle = torch.arange(N)[:, None] * 10000.0 ** (-torch.arange(0, 8, 2) / 8)
        turn = torch.polar(torch.ones_like(angle), angle)

        def rotated(x):
            pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
            return torch.view_as_real(pairs * (turn if x.dim() == 2 else turn[:, None])).flatten(-2)

        with torch.no_grad():
            for n, layer in enumerate(model.model.layers):
                a, p = layer.self_attn, lambda name, n=n: v[f"layers.{n}.{name}"]
                self.near(p("attn.k_rope"), rotated(p("attn.kv_a")[:, 16:]), "k_rope")
                self.near(p("attn.q")[..., 12:], rotated(p("attn.q_raw")[..., 12:]), "q")
                self.assertTrue(torch.equal(p("attn.q")[..., :12], p("attn.q_raw")[..., :12]))
                if a.indexer is not None:
                    q = f(p("attn.q_a_norm"), a.indexer.wq_b.weight).reshape(N, 2, 16)
                    self.near(p("attn.index_q"), torch.cat((rotated(q[..., :8]), q[..., 8:]), -1), "index_q")
                    k = a.indexer.k_norm(f(p("attn.norm"), a.indexer.wk.weight))
                    self.near(p("attn.index_k"), torch.cat((rotated(k[..., :8]), k[..., 8:]), -1), "index_k")
                    w = f(p("attn.norm"), a.indexer.weights_proj.weight) * (2 * 16) ** -0.5
                    self.near(p("attn.index_weights"), w, "index_weights")
                    dots = torch.einsum("thd,ud->thu", p("attn.index_q"), p("attn.index_k")).relu()
                    scores = torch.einsum("th,thu->tu", p("attn.index_weights"), dots)
                    later = torch.ones(N, N, dtype=torch.bool).triu(1)
                    self.near(p("attn.index_scores"), scores.masked_fill(later, float("-inf")), "index_scores")
                    for t, row in enumerate(p("attn.index_topk").tolist()):
                        scores, real = p("attn.index_scores")[t], [key for key in row if key >= 0]
                        self.assertEqual(row, sorted(set(real)) + [-1] * (5 - min(t + 1, 5)))
                        # Scores of 0 are many: which of equals is chosen is the engine's affair.
                        best = scores.topk(min(t + 1, 5)).values
                        self.assertEqual(sorted(scores[real].tolist()), sorted(best.tolist()))
                else:
                    self.assertNotIn(f"layers.{n}.attn.index_topk", v)
                if n == 0:
                    self.near(p("ffn.out"), f(p("ffn.hidden")[:, 0], layer.mlp.down_proj.weight), "dense")
                    continue
                scores = f(p("ffn.norm"), layer.mlp.gate.weight).sigmoid()
                self.near(p("ffn.choice_scores"), scores + layer.mlp.gate.e_score_correction_bias, "choice")
                best = p("ffn.choice_scores").topk(2)
                self.assertEqual(p("ffn.expert_ids").tolist(), best.indices.tolist())
                chosen = scores.gather(1, best.indices)
                weights = chosen / chosen.sum(-1, keepdim=True) * c.routed_scaling_factor
                self.near(p("ffn.expert_weights"), weights, "weights")
                down = layer.mlp.experts.down_proj[best.indices]
                routed = torch.einsum("tkw,tkhw,tk->th", p("ffn.hidden")[:, :2], down, weights)
                self.near(p("ffn.routed"), routed, "routed, from the hidden values in their slots")
                shared = f(p("ffn.hidden")[:, 2], layer.mlp.shared_experts.down_proj.weight)
                self.near(p("ffn.shared"), shared, "shared")

    def test_types_are_stated(self):
        index, _, _ = self.dump(self.model(torch.bfloat16))
        stored = {e["name"]: e.get("stored") for e in index["points"]}
        self.assertEqual((index["recipe"], stored["layers.1.attn.index_q"]), ("torch-bf16", "bf16"))
        self.assertEqual(stored["layers.1.attn.index_scores"], "f32")
        self.setUp()
        with torch.autocast("cpu", torch.bfloat16):
            index, _, _ = self.dump(self.model())
        stored = {e["name"]: e.get("stored") for e in index["points"]}
        self.assertEqual(index["recipe"], "torch-autocast-bf16")
        types = [stored[f"layers.1.{p}"] for p in ("input", "attn.q_a", "attn.q_a_norm", "attn.index_scores")]
        self.assertEqual(types, ["f32", "bf16", "f32", "bf16"])

    def test_points_that_are_made_with_others_need_not_be_asked_for_with_them(self):
        model = self.model()
        _, whole, _ = self.dump(model)
        self.setUp()
        capture = lockstep_capture.attach(model, layers=[2], only=r"attn\.q$|expert_ids|index_topk")
        with torch.no_grad():
            model(input_ids=self.ids, use_cache=False)
        _, some, _ = self.save(capture)
        # The keys of layer 2 are layer 1's choice.
        self.assertEqual(set(some), {"layers.1.attn.index_topk", "layers.2.attn.q", "layers.2.ffn.expert_ids"})
        for name, value in some.items():
            self.assertTrue(torch.equal(value, whole[name]), name)

    def test_padding_is_cut(self):
        model = self.model()
        for layer in model.model.layers[:2]:
            layer.self_attn.indexer.index_topk = model.config.index_topk = 16  # every key, padding too
        _, plain, _ = self.dump(model)
        for side in ("right", "left"):
            self.setUp()
            pad, mask = torch.zeros(1, 3, dtype=torch.long), torch.ones(1, N, dtype=torch.long)
            parts = [self.ids, pad] if side == "right" else [pad, self.ids]
            masks = [mask, pad] if side == "right" else [pad, mask]
            mask = torch.cat(masks, 1)
            position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
            call = {"attention_mask": mask, "position_ids": position_ids}
            index, values, _ = self.dump(model, torch.cat(parts, 1), **call)
            self.assertEqual(index["token_ids"], self.ids[0].tolist())
            self.assertEqual(values.keys(), plain.keys())
            for name, value in values.items():
                self.near(value.float(), plain[name].float(), f"{side}: {name}")

    def test_what_is_not_one_prompt_is_refused(self):
        model, pad = self.model(), torch.zeros(1, 3, dtype=torch.long)
        capture = lockstep_capture.attach(model)
        with self.assertRaisesRegex(lockstep_capture.CaptureError, "batch of 2 sequences"):
            model(input_ids=self.ids.repeat(2, 1), use_cache=False)
        capture.detach()
        capture = lockstep_capture.attach(model)
        mask = torch.cat((pad, torch.ones(1, N, dtype=torch.long)), 1)
        model(input_ids=torch.cat((pad, self.ids), 1), attention_mask=mask, use_cache=False)
        with self.assertRaisesRegex(lockstep_capture.CaptureError, "are not 0, 1, 2"):
            self.save(capture)

    def test_generation_keeps_the_prompt(self):
        model = self.model()
        capture = lockstep_capture.attach(model)
        model.generate(self.ids, max_new_tokens=3, do_sample=False, attention_mask=torch.ones_like(self.ids))
        index, values, missing = self.save(capture)
        self.assertEqual(index["token_ids"], self.ids[0].tolist())
        self.assertEqual(list(values["layers.2.attn.q_a"].shape), [N, 20])
        self.assertTrue(any("logits" in line and "rows" in line for line in missing), missing)

    def test_a_pass_that_fails_leaves_torch_as_it_was(self):
        model = self.model()
        capture = lockstep_capture.attach(model)
        with self.assertRaises(IndexError):
            model(input_ids=self.ids + SMALL["vocab_size"], use_cache=False)
        self.assertEqual(len(torch.overrides._get_current_function_mode_stack()), 0)
        model(input_ids=self.ids, use_cache=False)
        index, _, _ = self.save(capture)
        self.assertEqual(index["token_ids"], self.ids[0].tolist())


if __name__ == "__main__":
    unittest.main()
