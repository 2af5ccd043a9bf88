"""Corpora to token shards to batches, in an order that is arithmetic."""
