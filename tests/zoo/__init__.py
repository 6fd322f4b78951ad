"""`make zoo`: every architecture of TransformerLens' registry, built tiny and held against plain autograd."""
