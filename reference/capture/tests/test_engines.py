"""The hooks on small trees of vLLM's and SGLang's: `python -m unittest discover reference/capture/tests`."""

import json
import os
import sys
import tempfile
import threading
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.dirname(HERE)]
try:
    import torch
    from safetensors.torch import load_file

    import lockstep_capture
    import stubs
except ImportError as missing:
    torch, WHY = None, f"SKIPPED: {missing}; pip install torch safetensors"
    print(f"\n{__file__}: {WHY}", file=sys.stderr)

IDS = [5, 9, 2, 77, 31, 8, 8, 100, 3]


def save(capture, out):
    """Saves without the lines on stderr."""
    with open(os.devnull, "w", encoding="utf-8") as sink:
        stderr, sys.stderr = sys.stderr, sink
        try:
            return capture.save(out)
        finally:
            sys.stderr = stderr


@unittest.skipIf(torch is None, "no torch or no safetensors")
class Engines(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.out = os.path.join(folder.name, "dump")

    def dump(self, engine, **settings):
        model = stubs.Model(engine)
        plain = model(torch.tensor(IDS), torch.arange(len(IDS)))
        capture = lockstep_capture.attach(model, **settings)
        hooked = model(torch.tensor(IDS), torch.arange(len(IDS)))
        model(torch.tensor([4]), torch.tensor([len(IDS)]))  # a step of decoding, which must not be kept
        self.assertTrue(torch.equal(plain, hooked), "the hooks change the results")
        missing = save(capture, self.out)
        self.assertTrue(torch.equal(plain, model(torch.tensor(IDS), torch.arange(len(IDS)))))
        with open(os.path.join(self.out, "dump.json"), encoding="utf-8") as f:
            index = json.load(f)
        return model, index, load_file(os.path.join(self.out, "rank0.safetensors")), missing

    def near(self, found, expected, name):
        expected = expected.reshape(found.shape)
        self.assertTrue(torch.allclose(found, expected, rtol=1e-4, atol=1e-5), f"{name}: {(found - expected).abs().max()}")

    def check_stream(self, model, v):
        """Every point from its inputs, by the model's own weights."""
        c, body = model.config, model.model
        f = torch.nn.functional.linear
        for n, layer in enumerate(body.layers):
            a, p = layer.self_attn, lambda name, n=n: v[f"layers.{n}.{name}"]
            self.near(p("input"), v[f"layers.{n - 1}.output"] if n else v["embed"], "input")
            self.near(p("attn.norm"), layer.input_layernorm.norm(p("input")), "attn.norm")
            self.near(p("residual"), p("input") + p("attn.out"), "residual")
            self.near(p("ffn.norm"), layer.post_attention_layernorm.norm(p("residual")), "ffn.norm")
            self.near(p("output"), p("residual") + p("ffn.out"), "output")
            fused = a.fused_qkv_a_proj if hasattr(a, "mla_attn") else a.fused_qkv_a_proj_with_mqa
            self.near(torch.cat((p("attn.q_a"), p("attn.kv_a")), -1), f(p("attn.norm"), fused.weight), "q_a, kv_a")
            self.near(p("attn.q_a_norm"), a.q_a_layernorm.norm(p("attn.q_a")), "q_a_norm")
            self.near(p("attn.q_raw"), f(p("attn.q_a_norm"), a.q_b_proj.weight), "q_raw")
            self.near(p("attn.kv_latent"), a.kv_a_layernorm.norm(p("attn.kv_a")[:, : c.kv_lora_rank]), "kv_latent")
            query, key = p("attn.q_raw").clone(), p("attn.kv_a")[:, None, c.kv_lora_rank :].clone()
            a.rotary_emb(torch.arange(len(IDS)), query[..., c.qk_nope_head_dim :], key)
            self.near(p("attn.q"), query, "q")
            self.near(p("attn.k_rope"), key, "k_rope")
            self.near(p("attn.out"), f(p("attn.context"), a.o_proj.weight), "out")
            for name, kept in zip(("attn.index_q", "attn.index_k", "attn.index_weights"), kept_by(model, n)):
                self.near(p(name), kept, name)
            topk = p("attn.index_topk")
            for t, row in enumerate(topk.tolist()):
                real = [key for key in row if key >= 0]
                self.assertEqual(real, sorted(set(real)))
                self.assertEqual(len(real), min(t + 1, c.index_topk))
            if n:
                self.near(p("ffn.router_logits"), f(p("ffn.norm"), layer.mlp.gate.weight), "router_logits")
                scores = p("ffn.router_logits").sigmoid() + layer.mlp.gate.e_score_correction_bias
                best = scores.topk(c.num_experts_per_tok)
                self.assertEqual(p("ffn.expert_ids").tolist(), best.indices.tolist())
                self.near(p("ffn.expert_weights").sum(-1), torch.full((len(IDS),), 2.5), "expert_weights")
                self.near(p("ffn.shared"), layer.mlp.shared_experts(p("ffn.norm")), "shared")
            else:
                self.near(p("ffn.out"), f(p("ffn.hidden")[:, 0], layer.mlp.down_proj.weight), "dense out")
        self.near(v["final_norm"], body.norm.norm(v["layers.2.output"]), "final_norm")
        self.near(v["logits"], f(v["final_norm"], model.lm_head.weight), "logits")

    def test_vllm(self):
        with torch.no_grad():
            model, index, values, missing = self.dump("vllm")
            self.check_stream(model, values)
        self.assertEqual(index["producer"]["name"], "vllm")
        self.assertEqual(index["recipe"], "torch-f32")
        self.assertAlmostEqual(index["settings"]["latent_eps"], 1e-5)
        self.assertAlmostEqual(index["settings"]["index_eps"], 1e-6)
        self.assertEqual({e["stored"] for e in index["points"] if e["dtype"] == "F32"}, {"f32"})
        self.assertLessEqual(len(missing), 6, missing)
        self.assertTrue(any("ffn.hidden" in line for line in missing))

    def test_sglang(self):
        with torch.no_grad():
            model, index, values, _missing = self.dump("sglang")
            self.check_stream(model, values)
            for n, layer in enumerate(model.model.layers):
                w = layer.self_attn.kv_b_proj.weight.view(4, -1, 24)
                absorbed = torch.einsum("hdl,thd->thl", w[:, :12], values[f"layers.{n}.attn.q"][..., :12])
                self.near(values[f"layers.{n}.attn.q_absorbed"], absorbed, "q_absorbed")
                context = torch.einsum("hdl,thl->thd", w[:, 12:], values[f"layers.{n}.attn.latent"])
                self.near(values[f"layers.{n}.attn.context"], context, "context")
                if n:
                    total = values[f"layers.{n}.ffn.routed"] + values[f"layers.{n}.ffn.shared"]
                    self.near(values[f"layers.{n}.ffn.out"], total, "routed, shared")
        layouts = {e["name"]: e["layout"] for e in index["points"]}
        self.assertEqual(layouts["layers.1.ffn.routed"], "partial")
        self.assertEqual(layouts["layers.1.attn.q"], "sharded")

    def test_layers_and_points_can_be_chosen(self):
        _, index, values, _ = self.dump("vllm", layers=[2], only=r"attn\.q|output|input")
        kept = {"layers.1.output", "layers.2.input", "layers.2.attn.q_a", "layers.2.attn.q_a_norm", "layers.2.output"}
        self.assertEqual(set(values), kept | {"layers.2.attn.q_raw", "layers.2.attn.q"})
        self.assertEqual(index["tp"], 1)

    def test_rows_that_are_not_sampled_leave_logits_out(self):
        model = stubs.Model("sglang")
        model.logits_processor.rows = slice(-1, None)
        capture = lockstep_capture.attach(model)
        model(torch.tensor(IDS), torch.arange(len(IDS)))
        self.assertTrue(any(line.startswith("not captured: logits") for line in save(capture, self.out)))

    def test_half_precision_is_stated(self):
        model = stubs.Model("vllm").bfloat16()
        capture = lockstep_capture.attach(model)
        model(torch.tensor(IDS), torch.arange(len(IDS)))
        save(capture, self.out)
        with open(os.path.join(self.out, "dump.json"), encoding="utf-8") as f:
            index = json.load(f)
        stored = {e["name"]: e.get("stored") for e in index["points"]}
        self.assertEqual((index["recipe"], stored["layers.1.attn.q_a"]), ("torch-bf16", "bf16"))
        self.assertEqual(stored["layers.1.attn.index_weights"], "f32")
        self.assertIsNone(stored["layers.1.attn.index_topk"])

    def test_what_is_not_one_prompt_is_refused(self):
        for positions in (torch.arange(len(IDS)) + 4, torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4])):
            model = stubs.Model("vllm")
            capture = lockstep_capture.attach(model)
            model(torch.tensor(IDS), positions)
            with self.assertRaisesRegex(lockstep_capture.CaptureError, "are not 0, 1, 2"):
                save(capture, self.out)
            self.assertFalse(os.path.exists(self.out))
        with self.assertRaisesRegex(lockstep_capture.CaptureError, "no pass"):
            lockstep_capture.attach(stubs.Model("vllm")).save(self.out)

    def test_vllm_in_float16_is_refused(self):
        model = stubs.Model("vllm").half()
        capture = lockstep_capture.attach(model)
        model(torch.tensor(IDS), torch.arange(len(IDS)))
        with self.assertRaisesRegex(lockstep_capture.CaptureError, "float16"):
            save(capture, self.out)

    def test_ranks_write_one_dump(self):
        """Whole models stand for the ranks' parts: what is looked at is the folder."""
        captures = []
        for rank in (0, 1):
            model = stubs.Model("sglang")
            captures.append(lockstep_capture.attach(model, rank=rank, tp=2))
            model(torch.tensor(IDS), torch.arange(len(IDS)))
        thread = threading.Thread(target=lambda: captures[0].save(self.out))
        thread.start()
        captures[1].save(self.out)
        thread.join()
        with open(os.path.join(self.out, "dump.json"), encoding="utf-8") as f:
            index = json.load(f)
        self.assertEqual(sorted(os.listdir(self.out)), ["dump.json", "rank0.safetensors", "rank1.safetensors"])
        ranks = {}
        for entry in index["points"]:
            ranks.setdefault(entry["name"], []).append(entry["rank"])
        self.assertTrue(all(found == [0, 1] for found in ranks.values()))
        logits = [load_file(os.path.join(self.out, f"rank{r}.safetensors"))["logits"] for r in (0, 1)]
        self.assertEqual([list(x.shape) for x in logits], [[len(IDS), 64]] * 2)

    def test_a_dump_that_was_left_is_not_mixed_in(self):
        model = stubs.Model("sglang")
        capture = lockstep_capture.attach(model, rank=1, tp=2)
        model(torch.tensor(IDS), torch.arange(len(IDS)))
        capture.save(self.out)
        self.assertFalse(os.path.exists(self.out))
        capture = lockstep_capture.attach(model, rank=1, tp=2)
        model(torch.tensor(IDS), torch.arange(len(IDS)))
        with self.assertRaisesRegex(FileExistsError, "not finished"):
            capture.save(self.out)


def kept_by(model, n):
    """The indexer's query, key and weights, run again."""
    model(torch.tensor(IDS), torch.arange(len(IDS)))
    return model.model.layers[n].self_attn.indexer.kept


if __name__ == "__main__":
    unittest.main()
