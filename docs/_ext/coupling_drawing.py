"""The drawing that explains coupling: two directions that a block reads, where a block
takes them, and the coupling matrix A.
"""

import math

import torch
from torch import Tensor

import tl_coupling as tlc

WIDTH = 240
HEIGHT = 322
# Where the unit circle of the input and the plane of the output have their middles.
INPUT = 50.0, 96.0
OUTPUT = 176.0, 96.0
UNIT = 36.0
CELL = 44.0
MATRIX = 92.0, 180.0


def rotation(degrees: float) -> Tensor:
    angle = torch.tensor(math.radians(degrees))
    return torch.stack(
        [
            torch.stack([angle.cos(), -angle.sin()]),
            torch.stack([angle.sin(), angle.cos()]),
        ]
    )


V = rotation(25)
U = rotation(60)
# What each panel says, its Jacobian, and that in words.
PANELS = (
    (
        "Block 2 defines the directions",
        "J₂",
        U @ torch.diag(torch.tensor([1.4, 0.8])) @ V.T,
        "A holds the singular values of J₂",
    ),
    (
        "Block 1 is coupled with it",
        "J₁",
        U @ torch.diag(torch.tensor([0.7, 1.2])) @ V.T,
        "other gains, the same directions",
    ),
    (
        "Block 1 is not coupled with it",
        "J₁",
        U @ rotation(52) @ torch.diag(torch.tensor([1.2, 1.0])) @ V.T,
        "each v goes to both u",
    ),
)


def drawing() -> str:
    """Return a figure of one SVG for each panel, which takes its colours from the page
    and puts the panels below each other where there is no room.
    """
    panels = "".join(panel(*described) for described in PANELS)
    null = tlc.random_subspace_null(2)
    caption = (
        "<b>How to read it.</b> Block 2 reads the directions v₁ and v₂ and writes u₁ "
        "and u₂ (dashed): the top singular vectors of its Jacobian J₂. The entry of A "
        "in row i and column j says how much of uᵢ there is in J₁vⱼ. A is "
        "diagonal where block 1 takes each v to its own u. Coupling "
        f"is 1 then. Random directions give about {null:.2f} where there are two."
    )
    return (
        f'<figure class="coupling"><div>{panels}</div>'
        f"<figcaption>{caption}</figcaption></figure>\n"
    )


def panel(title: str, name: str, jacobian: Tensor, words: str) -> str:
    A = U.T @ jacobian @ V
    coupling = 1 - float(tlc.normalized_miscoupling(A))
    values = "; ".join(" ".join(f"{entry:.2f}" for entry in row) for row in A.tolist())
    parts = [
        text(WIDTH / 2, 20, title, "title"),
        f'<circle cx="{INPUT[0]}" cy="{INPUT[1]}" r="{UNIT}"/>',
        axes(),
        *(
            arrow(INPUT, V[:, i], f"v{'₁₂'[i]}", f"direction-{i + 1}")
            + arrow(
                OUTPUT, (jacobian @ V)[:, i], f"{name}v{'₁₂'[i]}", f"direction-{i + 1}"
            )
            for i in range(2)
        ),
        text(INPUT[0], 152, "reads"),
        text((INPUT[0] + OUTPUT[0]) / 2, 152, f"{name} →", "map"),
        text(OUTPUT[0], 152, "writes"),
        matrix(A),
        text(WIDTH / 2, 294, words),
        text(WIDTH / 2, 314, f"coupling {coupling:.2f}", "value"),
    ]
    label = f"{title}: A = [{values}], coupling {coupling:.2f}"
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
        + "".join(parts)
        + "</svg>"
    )


def text(x: float, y: float, words: str, kind: str = "said") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{words}</text>'


def axes() -> str:
    """Draw the lines along u₁ and u₂."""
    parts = []
    for i in range(2):
        x, y = (1.45 * UNIT * U[:, i]).tolist()
        end = OUTPUT[0] + x, OUTPUT[1] - y
        parts.append(
            f'<path class="axis direction-{i + 1}" d="M{OUTPUT[0] - x:.1f} '
            f'{OUTPUT[1] + y:.1f}L{end[0]:.1f} {end[1]:.1f}"/>'
        )
        beyond = OUTPUT[0] + 1.24 * x, OUTPUT[1] - 1.24 * y + 4
        parts.append(text(*beyond, f"u{'₁₂'[i]}", f"name direction-{i + 1}"))
    return "".join(parts)


def arrow(start: tuple[float, float], vector: Tensor, name: str, kind: str) -> str:
    """Draw a vector, up where its second entry is positive, with its name at the tip."""
    x, y = (UNIT * vector).tolist()
    length = math.hypot(x, y)
    tip = start[0] + x, start[1] - y
    along = x / length, -y / length
    base = tip[0] - 8 * along[0], tip[1] - 8 * along[1]
    side = 4 * along[1], -4 * along[0]
    head = (
        f"{tip[0]:.1f},{tip[1]:.1f} {base[0] + side[0]:.1f},{base[1] + side[1]:.1f} "
        f"{base[0] - side[0]:.1f},{base[1] - side[1]:.1f}"
    )
    named = ""
    if name.startswith("v"):
        named = text(
            tip[0] + 11 * along[0], tip[1] + 11 * along[1] + 4, name, f"name {kind}"
        )
    return (
        f'<path class="{kind}" d="M{start[0]} {start[1]}L{base[0]:.1f} {base[1]:.1f}">'
        f"<title>{name}</title></path>"
        f'<polygon class="{kind}" points="{head}"/>{named}'
    )


def matrix(A: Tensor) -> str:
    """Draw A, darker where its entries are larger."""
    parts = [text(MATRIX[0] - 42, MATRIX[1] + CELL + 5, "A =", "map")]
    for i in range(2):
        middle = i * CELL + CELL / 2
        kind = f"name direction-{i + 1}"
        parts.append(text(MATRIX[0] + middle, MATRIX[1] - 6, f"v{'₁₂'[i]}", kind))
        parts.append(
            text(MATRIX[0] + 2 * CELL + 13, MATRIX[1] + middle + 5, f"u{'₁₂'[i]}", kind)
        )
        for j in range(2):
            x, y = MATRIX[0] + j * CELL, MATRIX[1] + i * CELL
            # Rounded, so that nothing is called −0.0.
            entry = round(float(A[i, j]), 1) + 0.0
            share = min(1.0, abs(entry) / 1.4)
            parts.append(
                f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" '
                f'fill-opacity="{0.75 * share:.2f}"/>'
            )
            parts.append(text(x + CELL / 2, y + CELL / 2 + 5, f"{entry:.1f}", "entry"))
    return "".join(parts)
