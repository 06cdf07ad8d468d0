"""Products of a mixture's experts: tokens sorted by expert, one grouped product for all."""
