"""The reader of llama.cpp's tensors: `python -m unittest discover reference/capture/tests`."""

import json
import os
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.dirname(HERE)]
try:
    import torch
    from safetensors.torch import load_file

    import lockstep_capture
except ImportError as missing:
    torch = None
    print(f"\n{__file__}: SKIPPED: {missing}; pip install torch safetensors", file=sys.stderr)

N, HEADS, NOPE, ROPE, KV = 5, 2, 6, 4, 8


@unittest.skipIf(torch is None, "no torch or no safetensors")
class LlamaCpp(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder, self.lines, self.given = folder.name, [], {}
        torch.manual_seed(0)

    def put(self, name, operation, *shape, value=None):
        """A tensor as the callback writes it: extents fastest first."""
        value = torch.randn(*shape) if value is None else value
        kind = "i32" if value.dtype == torch.int32 else "f32"
        extents = [*reversed(value.shape), 1, 1, 1][:4]
        self.lines.append(f"{len(self.lines)} {name} {operation} {kind} " + " ".join(map(str, extents)))
        with open(os.path.join(self.folder, f"{len(self.lines) - 1}.bin"), "wb") as f:
            f.write(value.contiguous().numpy().tobytes())
        return value

    def read(self):
        with open(os.path.join(self.folder, "tensors.txt"), "w", encoding="utf-8") as f:
            f.write("\n".join(self.lines) + "\n")
        out = os.path.join(self.folder, "dump")
        with open(os.devnull, "w", encoding="utf-8") as sink:
            stderr, sys.stderr = sys.stderr, sink
            try:
                missing = lockstep_capture.from_llama_cpp(self.folder, range(N), out, index_topk=3, version="b1")
            finally:
                sys.stderr = stderr
        with open(os.path.join(out, "dump.json"), encoding="utf-8") as f:
            index = json.load(f)
        return index, load_file(os.path.join(out, "rank0.safetensors")), missing

    def test_names_and_operations(self):
        embed = self.put("inp_embd", "GET_ROWS", N, 16)
        self.put("norm-0", "RMS_NORM", N, 16)
        norm = self.put("attn_norm-0", "MUL", N, 16)
        q_a, q_norm = self.put("q-0", "MUL_MAT", N, 7), self.put("q-0", "MUL", N, 7)
        q = self.put("q-0", "MUL_MAT", N, HEADS * (NOPE + ROPE))
        self.put("q_pe-0", "VIEW", N, HEADS, ROPE)
        turned = self.put("q_pe-0", "ROPE", N, HEADS, ROPE)
        absorbed = self.put("q_nope_absorbed-0", "MUL_MAT", HEADS, N, KV)
        self.put("indexer_q-0", "MUL_MAT", N, 3 * 8)
        index_q = self.put("indexer_q-0", "CONCAT", N, 3, 8)
        self.put("indexer_q-0", "MUL_MAT", N, 3, 8)  # behind the Hadamard transform
        scores = self.put("indexer_score-0", "ADD", N, 256)
        choice = torch.tensor([[0, 1, 2], [1, 0, 4], [2, 0, 1], [3, 1, 2], [4, 0, 3]], dtype=torch.int32)
        self.put("top_k-0", "CONT", value=choice)
        weights = self.put("ffn_moe_weights_scaled-0", "SCALE", N, 2, 1)
        order = torch.stack([torch.randperm(4) for _ in range(N)]).to(torch.int32)
        self.put("ffn_moe_argsort-0", "ARGSORT", value=order)
        inner, shared = self.put("ffn_moe_swiglu-0", "GLU", N, 2, 6), self.put("ffn_swiglu-0", "GLU", N, 6)
        self.put("ffn_moe_logits-0", "MUL_MAT", N, 4)
        output = self.put("l_out-0", "ADD", N, 16)
        self.put("result_output", "MUL_MAT", 1, 100)
        index, v, missing = self.read()
        for name, expected in {
            "embed": embed, "layers.0.input": embed, "layers.0.attn.norm": norm, "layers.0.attn.q_a": q_a,
            "layers.0.attn.q_a_norm": q_norm, "layers.0.attn.q_raw": q.reshape(N, HEADS, -1),
            "layers.0.attn.q": torch.cat((q.reshape(N, HEADS, -1)[..., :NOPE], turned), -1),
            "layers.0.attn.q_absorbed": absorbed.transpose(0, 1), "layers.0.attn.index_q": index_q,
            "layers.0.attn.index_scores": scores[:, :N], "layers.0.ffn.expert_weights": weights[..., 0],
            "layers.0.ffn.expert_ids": order[:, :2], "layers.0.output": output,
            "layers.0.ffn.hidden": torch.cat((inner, shared[:, None]), 1),
        }.items():  # fmt: skip
            self.assertTrue(torch.equal(v[name], expected), name)
        chosen = [[0, -1, -1], [0, 1, -1], [0, 1, 2], [1, 2, 3], [0, 3, 4]]
        self.assertEqual(v["layers.0.attn.index_topk"].tolist(), chosen)
        self.assertNotIn("logits", v)
        self.assertTrue(any(line.startswith("not captured: logits: not one row") for line in missing), missing)
        self.assertEqual((index["producer"]["name"], index["recipe"]), ("llama.cpp", "llama.cpp"))

    def test_a_folder_without_layers_is_refused(self):
        self.put("inp_embd", "GET_ROWS", N, 16)
        with self.assertRaisesRegex(lockstep_capture.CaptureError, "no tensor of a layer"):
            self.read()


if __name__ == "__main__":
    unittest.main()
