"""Models that read a text from both ends at once and write none: BERT, RoBERTa, ModernBERT and their kin."""
