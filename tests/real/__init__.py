"""`make real`: trained weights from the package index, every block checked against
HuggingFace's own in float64.
"""
