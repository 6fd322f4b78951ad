"""`make zoo`: every architecture of TransformerLens' registry, built tiny and checked
against plain autograd.
"""
