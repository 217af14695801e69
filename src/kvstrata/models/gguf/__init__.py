"""GGUF files, llama.cpp's format, as MLX model folders: the container, packed weights, names, tokenizers."""
