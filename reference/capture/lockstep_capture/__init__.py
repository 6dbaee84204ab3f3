"""Writes a lockstep dump from a running GLM-5-type model: transformers, vLLM, SGLang, or what llama.cpp printed.

    import lockstep_capture
    capture = lockstep_capture.attach(model)                  # on every tensor-parallel rank
    model(input_ids=torch.tensor([ids]), use_cache=False)     # the first pass is kept, later ones are not
    missing = capture.save("out")                             # on every rank; rank 0 writes dump.json last

    lockstep verify activations -m path --target out

Needs torch and safetensors, nothing else. `missing` says what could not be reached, one line per kind of point, and
what to add to reach it; rank 0 prints it, too. What is not reached is left out of the dump, never guessed.

points.py     what a dump holds: layouts and shapes
capture.py    the hooks, and what they keep
write.py      the folder, whole or not at all
transformers_engine.py, fused_engines.py    where each engine has its values
llama_cpp.py  a reader of what llama.cpp's eval-callback prints
"""

from .capture import Capture, CaptureError, attach
from .llama_cpp import from_llama_cpp

__all__ = ["Capture", "CaptureError", "attach", "from_llama_cpp"]
