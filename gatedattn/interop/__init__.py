"""Weights and modules in and out: Hugging Face folders, GGUF files, and other people's models."""
