"""Text to token ids and back: train, judge and use a SentencePiece tokenizer."""
