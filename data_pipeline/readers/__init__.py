"""Readers, one file a format; data_pipeline/corpus.py is what others use."""
