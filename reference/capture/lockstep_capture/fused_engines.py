class Vllm:
    name="vllm"
    fits=staticmethod(lambda m: False)
class Sglang(Vllm):
    name="sglang"
