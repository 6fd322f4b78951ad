"""Names of controls and nulls: the same in tables, in figures and on pages."""

# The conditions that `directions.steer` and `directions.ablate` compare, by their
# `kinds`.
CONTROLS = {
    "direction": "singular vectors",
    "shared": "shared directions",
    "random": "random",
    "rotated": "random, in their span",
    "norm_matched": "random, of the same length",
    "principal": "principal directions",
    "span": "random, in the span of activations",
    "activations": "as the stream varies",
    "unshared": "not shared, of the same gain",
    "low_gain": "of small gain",
}
# The same of directions and of a subspace of one's own.
OWN_CONTROLS = CONTROLS | {
    "direction": "own directions",
    "shared": "own subspace",
    "unshared": "outside it, of the same gain",
}
# The conditions that `directions.rotate` compares, by their `kinds`.
ROTATIONS = {
    "together": "one rotation, coupling kept",
    "apart": "one each, coupling destroyed",
    "alone": "one layer rotated",
    "shrunk": "shrunk by cos θ",
}
# Names of nulls, the results if nothing were coupled, by what is drawn at random.
RANDOM_SUBSPACES = "random subspaces"
RANDOM_BASES = "random bases, same singular values"
RANDOM_AXES = "random axes"
RANDOM_MATRIX = "random matrix, same singular values"
TURNED_BLOCKS = "blocks turned at random"
RANDOM_STEPS = "random steps"
RANDOM_FRAMES = "random frames"
