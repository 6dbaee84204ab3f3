def from_llama_cpp(): pass
