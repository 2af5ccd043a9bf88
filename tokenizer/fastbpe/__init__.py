"""SentencePiece's BPE, compiled: the same ids many times faster, for the models that conditions.py lets through."""
