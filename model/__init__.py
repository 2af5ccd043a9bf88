"""The architecture: a Llama-style decoder. Imports torch only."""
