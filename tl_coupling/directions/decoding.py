"""What a block's singular vectors read and write, in tokens and components."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tl_coupling.arguments import Count, Seed, checked, made_by
from tl_coupling.blocks import Trace, own_arithmetic
from tl_coupling.comparisons import SeveralTraces, as_trace
from tl_coupling.directions.downstream import carry_to_end, change_of_logits
from tl_coupling.directions.interventions import Directions, Side, own_facts
from tl_coupling.directions.random_directions import span_vectors, unit_vectors
from tl_coupling.directions.subspaces import Subspace
from tl_coupling.files import plain
from tl_coupling.jacobians import block_directions, block_jacobian
from tl_coupling.measures import seeded
from tl_coupling.models import (
    JacobianLens,
    UsableLens,
    bridge_of,
    refuse_offloaded,
    usable_lens,
)
from tl_coupling.results import DifferentPrompts, Saved, ShortTable
from tl_coupling.trajectories import check_lens

if TYPE_CHECKING:
    import pandas

Way = Literal["unembedding", "final_norm", "network", "lens"]
Control = Literal["random", "rotated", "other_prompts"]
CONTROLS: tuple[Control, ...] = ("random", "rotated", "other_prompts")
ENDS = ("+", "-")
_DEFAULT_K = 10
# How many tokens of each end of a direction, and components, a short table shows.
_N_TOKENS_SHOWN = 4
_N_COMPONENTS_SHOWN = 2
# Gains closer than this are one group: inside it, singular vectors are one frame of
# many, and no claim about a single one of them can be made.
SAME_GAIN = 0.01
# Rows that differ by less than this share are one.
_SAME_ROW = 1e-4
# How far, as a share, the stream of a bridge may lie from that of its model.
_SAME_STREAM = 1e-3
_LARGE = 1024


@made_by("directions.decode(trace, layer)")
@checked
@dataclass(frozen=True, eq=False, repr=False)
class Decoded(Saved):
    """Tokens that a block's `write` directions promote, and components that its `read`
    directions answer to, with controls.

    Directions of one's own are both: what they promote where they are in the stream,
    and what each component wrote along them by then.

    The sign of a direction is arbitrary: both ends are given. Token lists can always be
    read: `kurtosis` and `next_token_rank` say whether there is more in them than in
    those of the controls.

    Attributes:
        gains: the singular values, `[direction]`; of directions of one's own `‖J v‖`
            for what the block reads, `‖Jᵀ v‖` for what it writes.
        groups: of each direction; those whose gains differ by less than 1 % from one to
            the next are one group, and no claim is made inside it. Each of one's own is
            a group.
        tokens: entries of `texts`, `[way direction end rank]`: what each end promotes
            most, by each way.
        logits: their logits, for a direction of length 1.
        kurtosis: excess kurtosis of a direction's logits over the vocabulary, `[way
            direction]`: 0 for a normal distribution.
        next_token_rank: the place of the model's own next token among the logits of
            each end, from 1, `[way direction end]`.
        control_kurtosis, control_next_token_rank: the same of controls, the rank at the
            better end, `[control way draw]`; NaN where there is none.
        reads: product of each `read` direction with what each component wrote,
            `[direction component]`; its sum over components is that with the stream.
        control_reads: root mean square of the same of random directions,
            `[component]`.
        components: labels, as TransformerLens has them: "embed", "L3H2", "3_mlp_out";
            "rest" is what is none of them, such as biases of attention. Where heads are
            not told apart, as in a model whose weights are on disk, "3_attn_out".
        ways: "unembedding", `u W_U` alone; "final_norm", with the derivative of what
            follows the last block at this token; "network", through the later blocks
            first; "lens", through a lens instead.
        texts: of the tokens that occur.
        token_ids: their ids.
        layer, position: of the Jacobian, counted from 0.
        provenance: how it was made; JSON-able.

    Example:
        >>> decoded = tlc.directions.decode(trace, layer=0, k=2, n_tokens=3)
        >>> decoded.ways, decoded.tokens.shape
        (('unembedding', 'final_norm', 'network'), torch.Size([3, 2, 2, 3]))
        >>> x = trace.residual[0, -1]
        >>> read = tlc.jacobians.block_directions(trace, layer=0, k=2).read
        >>> torch.allclose(decoded.reads.sum(1), x @ read, atol=1e-5)
        True
        >>> tlc.directions.Decoded.load(decoded.save("decoded.nc")).texts == decoded.texts
        True
    """

    gains: Float[Tensor, " k"]
    groups: Int[Tensor, " k"]
    tokens: Int[Tensor, "n_ways k 2 n_tokens"]
    logits: Float[Tensor, "n_ways k 2 n_tokens"]
    kurtosis: Float[Tensor, "n_ways k"]
    next_token_rank: Int[Tensor, "n_ways k 2"]
    control_kurtosis: Float[Tensor, "n_controls n_ways n_draws"]
    control_next_token_rank: Float[Tensor, "n_controls n_ways n_draws"]
    reads: Float[Tensor, "k n_components"]
    control_reads: Float[Tensor, " n_components"]
    components: tuple[str, ...]
    ways: tuple[str, ...]
    texts: tuple[str, ...]
    token_ids: tuple[int, ...]
    layer: int
    position: int
    provenance: dict[str, Any]
    DIMS: ClassVar = {
        "gains": "direction",
        "groups": "direction",
        "tokens": "way direction end rank",
        "logits": "way direction end rank",
        "kurtosis": "way direction",
        "next_token_rank": "way direction end",
        "control_kurtosis": "control way draw",
        "control_next_token_rank": "control way draw",
        "reads": "direction component",
        "control_reads": "component",
        "components": "component",
        "ways": "way",
        "texts": "text",
        "token_ids": "text",
    }

    def to_dataframe(self) -> "pandas.DataFrame":
        """Return one row for each way, direction, end and token.

        `kurtosis_exceeded` is the share of a control's draws with at least the
        direction's kurtosis, for each control.

        Example:
            >>> table = tlc.directions.decode(trace, layer=0, k=2, n_tokens=3).to_dataframe()
            >>> len(table), list(table.columns)[:4]
            (36, ['way', 'direction', 'end', 'rank'])
        """
        import pandas

        rows: list[dict[str, object]] = []
        for w, way in enumerate(self.ways):
            for i, group in enumerate(self.groups.tolist()):
                direction_values = {
                    "gain": float(self.gains[i]),
                    "group": group,
                    "kurtosis": float(self.kurtosis[w, i]),
                    **{
                        f"kurtosis_exceeded_by_{control}": self.kurtosis_exceeded(
                            w, i, control
                        )
                        for control in CONTROLS
                    },
                }
                for e, end in enumerate(ENDS):
                    next_rank = int(self.next_token_rank[w, i, e])
                    for rank, text in enumerate(self.texts_of(w, i, e)):
                        rows.append(
                            {
                                "way": way,
                                "direction": i,
                                "end": end,
                                "rank": rank + 1,
                                "token": text,
                                "logit": float(self.logits[w, i, e, rank]),
                                "next_token_rank": next_rank,
                                **direction_values,
                            }
                        )
        return pandas.DataFrame(rows)

    def texts_of(self, way: int, direction: int, end: int) -> list[str]:
        """Return the tokens that an end of a direction promotes most, by index."""
        return [self.texts[index] for index in self.tokens[way, direction, end]]

    @checked
    def kurtosis_exceeded(
        self, way: int, direction: int, control: Control = "random"
    ) -> float:
        """Return the share of a control's draws with at least a direction's kurtosis, by
        index.

        NaN of a control without draws, and of a kurtosis that is not known. Draws whose
        kurtosis is NaN are left out.
        """
        own = self.kurtosis[way, direction]
        # Controls of fewer draws are filled up with NaN.
        drawn = self.control_kurtosis[CONTROLS.index(control), way]
        drawn = drawn[~drawn.isnan()]
        # No draw would be above NaN, as if it stood out.
        if not len(drawn) or bool(own.isnan()):
            return math.nan
        return float((drawn >= own).double().mean())

    def above_control(self, way: int, control: Control = "random") -> list[int]:
        """Return the directions whose kurtosis is above that of every draw of a control,
        by index.

        Of directions that are as the draws are, `k / (n_draws + 1)` are above on average.
        One whose kurtosis is not known is not above, and none is above a control without
        draws.

        Example:
            >>> decoded = tlc.directions.decode(trace, layer=0, k=6)
            >>> decoded.above_control(decoded.ways.index("network"))
            []
        """
        return [
            i
            for i in range(self.kurtosis.shape[1])
            if self.kurtosis_exceeded(way, i, control) == 0
        ]

    def table(self) -> ShortTable:
        """Return the directions, by what they do through the rest of the network."""
        way = self.ways.index("network")
        rows: list[list[object]] = []
        for i, gain in enumerate(self.gains.tolist()):
            ends = [
                " ".join(
                    plain(text).strip() or repr(text)
                    for text in self.texts_of(way, i, end)[:_N_TOKENS_SHOWN]
                )
                for end in (0, 1)
            ]
            rows.append(
                [
                    str(int(self.groups[i])),
                    f"+ {ends[0]}\n− {ends[1]}",
                    self._components_in_words(i),
                    f"{gain:.2f}",
                    f"{float(self.kurtosis[way, i]):.2f}",
                    f"{self.kurtosis_exceeded(way, i):.2f}",
                ]
            )
        title = (
            f"{self.provenance['model']}: what block {self.layer} writes and reads, "
            f"token {self.position}"
        )
        caption = (
            "tokens through the rest of the network; the sign of a direction is "
            "arbitrary\n"
            "gains of a group differ by less than 1 %: no claim about one of its "
            "directions\n"
            "random: share of random directions with at least this kurtosis"
        )
        numbers = ["gain", "kurtosis", "random"]
        return ShortTable.of(
            title, ["group", "writes", "reads"], numbers, rows, caption
        )

    def _components_in_words(self, direction: int) -> str:
        """Return the components that a read direction responds to most."""
        reads = self.reads[direction]
        n_shown = min(_N_COMPONENTS_SHOWN, len(reads))
        largest = reads.abs().topk(n_shown).indices.tolist()
        return ", ".join(
            f"{self.components[i]} {float(reads[i]):+.2f}" for i in largest
        )

    def _summary(self) -> str:
        n_groups = len(set(self.groups.tolist()))
        return (
            f"layer {self.layer}, token {self.position}, {len(self.gains)} directions "
            f"in {n_groups} groups, by {', '.join(self.ways)}"
        )


@checked
def decode(
    trace: Trace,
    layer: int | Directions | Subspace,
    k: Count | None = None,
    *,
    side: Side | None = None,
    position: int = -1,
    n_tokens: Count = 10,
    lens: JacobianLens | None = None,
    others: SeveralTraces = (),
    n_draws: Count = 20,
    seed: Seed = 0,
) -> Decoded:
    r"""Say what the top k singular vectors of a block read and write, at one token.

    .. math::

        u^\top W_U, \qquad W_U \, DN \, u, \qquad
        W_U \, DN \, (I + J^{L-1}) \cdots (I + J^{l+1}) \, u, \qquad v \cdot c

    for each `write` direction u, with DN the derivative of the final norm at this
    token's stream, and for each `read` direction v and what each component c (the
    embedding, each head, each MLP before this block) wrote at this token.

    Args:
        trace: a traced prompt of a language model.
        layer: the block; or `Directions` instead of its singular vectors, such as
            `Directions.of(vectors, layer)` of one's own. Then u and v are both these,
            products start behind their hook point, and components are those before it.
            Or a `Subspace`, whose shared directions are taken behind the last of its
            blocks; `subspace.directions(layer)` takes them at another.
        k: how many singular vectors, 10 by default; of directions all by default, the
            most shared ones first.
        side: of a subspace, as in `Subspace.hooks`: "write" for the directions that its
            blocks write, "read" for those that they read. By default that of one's own
            subspace, and "write" of a shared one.
        position: the token; the last by default.
        n_tokens: how many tokens are listed at each end.
        lens: a `JacobianLens` of TransformerLens, or `trajectories.product_lens`, for
            one more way.
        others: other prompts of the same model: the block's singular vectors there are
            one more control. Directions have no others.
        n_draws: how many random directions, and rotations inside the span of the k, are
            drawn.
        seed: of the draws.

    Raises:
        ValueError: a layer, position or k out of range; a model without an unembedding;
            directions of another model or width; `others`, or a lens for what block 0
            reads, beside directions; `side` of anything but a subspace; a HuggingFace
            model in memory of which TransformerLens makes no bridge, or one with
            another stream.

    Cost: the Jacobians of this and of all later blocks; the logits of `k + 2 n_draws`
    directions, two or three times; one pass of the model with TransformerLens's cache,
    for which a model in memory gets a bridge.

    Example:
        >>> decoded = tlc.directions.decode(trace, layer=1, k=2, n_tokens=3)
        >>> decoded.next_token_rank.shape, decoded.components[:2]
        (torch.Size([3, 2, 2]), ('embed', 'L0H0'))
        >>> probes = tlc.directions.Directions.of(torch.eye(32)[:3], layer=0)
        >>> tlc.directions.decode(trace, probes).reads.shape  # embed, heads, MLP, rest
        torch.Size([3, 7])
        >>> subspace = tlc.directions.shared_subspace([trace], rank=2, k=4)
        >>> tlc.directions.decode(trace, subspace, n_tokens=3).tokens.shape
        torch.Size([3, 2, 2, 3])

    Source: TransformerLens's `SVDInterpreter` for the first way, of weights there.
    """
    t = trace.position_index(position)
    if lens is not None:
        lens = usable_lens(lens)
        check_lens(lens, trace)
    # The rest knows directions alone.
    if isinstance(layer, Subspace):
        layer = layer.directions(side=side)
    elif side is not None:
        raise ValueError(
            "`side` says which directions of a subspace are decoded: a block's are both, "
            "and `Directions` have their own side; leave it out"
        )
    if isinstance(layer, Directions):
        found = _Found.from_directions(trace, layer, k, t, lens)
        if others:
            raise ValueError(
                "`others` are prompts on which a block has other singular vectors: "
                "directions are the same on all, leave it out"
            )
    else:
        found = _Found.from_block(trace, layer, k or _DEFAULT_K, t)
    generator = seeded(seed)
    drawn = {
        "random": unit_vectors(n_draws, trace.d_model, generator).to(found.write),
        "rotated": span_vectors(n_draws, found.span, generator),
    }
    later = _Later(trace, found.first_layer, t, lens)
    direction_logits = later.read_out(found.write)
    # The token that the model itself finds most likely, not the next one of the text.
    next_token = int(trace.logits(trace.residual[-1, t], trace.final_norm).argmax())
    control_logits = [later.read_out(vectors) for vectors in drawn.values()]
    control_logits.append(
        _other_prompt_logits(
            others, trace, found.layer, len(found.write), position, later
        )
    )
    tops = _tops(direction_logits, n_tokens)
    # Sorted, so that `searchsorted` gives each token its place among the texts.
    token_ids = sorted(set(tops.indices.flatten().tolist()))
    components, labels = _components(trace, found.n_before, t)
    random_reads = drawn["random"].to(components) @ components.mT
    statistics = [_statistics(logits, next_token) for logits in control_logits]
    return Decoded(
        gains=found.gains,
        groups=found.groups,
        tokens=torch.searchsorted(torch.tensor(token_ids), tops.indices.cpu()),
        logits=tops.values,
        kurtosis=_kurtosis(direction_logits),
        next_token_rank=_ranks(direction_logits, next_token),
        control_kurtosis=_padded([kurtosis for kurtosis, _ in statistics]),
        control_next_token_rank=_padded([rank for _, rank in statistics]),
        reads=found.read.to(components) @ components.mT,
        control_reads=random_reads.square().mean(0).sqrt(),
        components=labels,
        ways=later.ways,
        texts=_texts(trace, token_ids),
        token_ids=tuple(token_ids),
        layer=found.layer,
        position=t,
        provenance={
            **found.provenance,
            "n_draws": n_draws,
            "seed": seed,
            "controls": list(CONTROLS),
            "next_token": next_token,
        },
    )


class _Found(NamedTuple):
    """What is decoded.

    Attributes:
        write: whose tokens are listed, before block `first_layer`.
        read: whose products with the first `n_before` blocks' components are taken.
        span: of `write`, orthonormal columns.
        gains, groups, layer, provenance: see `Decoded`.
    """

    write: Float[Tensor, "k d"]
    read: Float[Tensor, "k d"]
    span: Float[Tensor, "d m"]
    first_layer: int
    n_before: int
    gains: Float[Tensor, " k"]
    groups: Int[Tensor, " k"]
    layer: int
    provenance: dict[str, Any]

    @classmethod
    def from_block(cls, trace: Trace, layer: int, k: int, position: int) -> "_Found":
        found = block_directions(trace, trace.layer_index(layer), k, position)
        return cls(
            found.write.mT,
            found.read.mT,
            found.write,
            found.layer + 1,
            found.layer,
            found.gains,
            _groups(found.gains),
            found.layer,
            found.provenance,
        )

    @classmethod
    def from_directions(
        cls,
        trace: Trace,
        directions: Directions,
        k: int | None,
        position: int,
        lens: UsableLens | None,
    ) -> "_Found":
        directions.check_fits(trace.model)
        n = len(directions)
        if k is not None and k > n:
            raise ValueError(
                f"`k` must be at most {n}, the number of directions, got {k}"
            )
        vectors = directions.vectors[:k].to(trace.residual)
        is_written = directions.side == "write"
        depth = directions.layer + is_written
        if lens is not None and not depth:
            raise ValueError(
                "a lens starts behind a block: it has nothing for what block 0 reads, "
                "leave `lens` out"
            )
        J = block_jacobian(trace, directions.layer, position=position)
        origin = directions.provenance.get("subspace")
        return cls(
            vectors,
            vectors,
            torch.linalg.qr(vectors.mT).Q,
            depth,
            depth,
            (vectors.to(J) @ (J if is_written else J.mT)).norm(dim=1),
            torch.arange(len(vectors), device=vectors.device),
            directions.layer,
            {
                **trace.provenance,
                **own_facts(directions.provenance),
                "hook_point": directions.hook_point,
                **({} if origin is None else {"subspace": origin}),
            },
        )


class _Later(NamedTuple):
    """The ways from a direction before a block to the logits of one token."""

    trace: Trace
    first_layer: int
    position: int
    lens: UsableLens | None

    @property
    def ways(self) -> tuple[str, ...]:
        names = ("unembedding", "final_norm", "network")
        return names if self.lens is None else (*names, "lens")

    def read_out(self, vectors: Float[Tensor, "n d"]) -> Float[Tensor, "n_ways n v"]:
        """Return the logits of each direction, by each way."""
        trace, t = self.trace, self.position
        # On the way the direction passes the blocks behind it.
        arrived = carry_to_end(trace, vectors, self.first_layer, t)
        logits_by_way = [
            _unembedded(trace, vectors),
            change_of_logits(trace, vectors, t),
            change_of_logits(trace, arrived, t),
        ]
        if self.lens is not None:
            # A lens counts the blocks that a direction is behind.
            transported = self.lens.transport(vectors, self.first_layer - 1)
            logits_by_way.append(change_of_logits(trace, transported, t))
        # In the memory of the CPU, where results of controls and tables are.
        return torch.stack([logits.float().cpu() for logits in logits_by_way])


def _unembedded(trace: Trace, vectors: Float[Tensor, "n d"]) -> Float[Tensor, "n v"]:
    """Return `u W_U` of each direction."""
    refuse_offloaded(trace.model, "the unembedding of directions")
    # The unembedding of a model on disk is read for this.
    with own_arithmetic(trace.model, fills_at_once=True):
        W_U = getattr(trace.model, "W_U", None)
        if not isinstance(W_U, Tensor):
            raise ValueError(
                "this model has no unembedding `W_U`: its directions have no tokens"
            )
        return vectors.to(W_U) @ W_U.detach()


def _other_prompt_logits(
    others: Iterable[object],
    trace: Trace,
    layer: int,
    k: int,
    position: int,
    later: _Later,
) -> Float[Tensor, "n_ways n v"]:
    """Return the logits of the same block's directions on other prompts, read out where
    those of this prompt are.
    """
    found = []
    different = DifferentPrompts("others")
    # The prompt itself is no other one.
    different.add_traced(trace)
    for item in others:
        other = as_trace(item, "others")
        if other.model is not trace.model:
            raise ValueError("`others` must be traced with the model of `trace`")
        different.add_traced(other)
        found.append(block_directions(other, layer, k, position).write.mT)
    if not found:
        # Without other prompts this control has no draws.
        return trace.residual.new_zeros(len(later.ways), 0, 1)
    return later.read_out(torch.cat(found))


class _Tops(NamedTuple):
    """Largest logits of both ends, and whose they are."""

    values: Float[Tensor, "n_ways k 2 n_tokens"]
    indices: Int[Tensor, "n_ways k 2 n_tokens"]


def _tops(logits: Float[Tensor, "n_ways k v"], n_tokens: int) -> _Tops:
    n_tokens = min(n_tokens, logits.shape[-1])
    # The other end of a direction has its logits with the other sign.
    largest = torch.stack([logits, -logits], dim=2).topk(n_tokens)
    return _Tops(largest.values, largest.indices)


def _groups(gains: Float[Tensor, " k"]) -> Int[Tensor, " k"]:
    """Number the groups of gains that differ by less than 1 % from one to the next."""
    is_apart = gains[1:] < (1 - SAME_GAIN) * gains[:-1]
    return torch.cat([torch.zeros(1).long(), is_apart.long().cumsum(0).cpu()])


def _kurtosis(logits: Float[Tensor, "*batch v"]) -> Float[Tensor, "*batch"]:
    """Return excess kurtosis over the vocabulary."""
    centred = logits.double() - logits.double().mean(-1, keepdim=True)
    variance = centred.square().mean(-1)
    return (centred.pow(4).mean(-1) / variance.square() - 3).float()


def _ranks(
    logits: Float[Tensor, "n_ways n v"], token: int
) -> Int[Tensor, "n_ways n 2"]:
    """Return the place of a token among the logits of both ends, from 1."""
    # A token's place is 1 and the logits above it, or below it at the other end.
    own = logits[..., token, None]
    return torch.stack([(logits > own).sum(-1), (logits < own).sum(-1)], -1) + 1


def _statistics(
    logits: Float[Tensor, "n_ways n v"], next_token: int
) -> tuple[Tensor, Tensor]:
    """Return the kurtosis of controls, and the next token's rank at the better end."""
    if not logits.shape[1]:
        nothing = logits.new_zeros(logits.shape[:2])
        return nothing, nothing
    return _kurtosis(logits), _ranks(logits, next_token).amin(-1).float()


def _padded(
    control_values: Sequence[Float[Tensor, "n_ways n"]],
) -> Float[Tensor, "n_controls n_ways n_most"]:
    """Stack controls of different numbers of draws, with NaN where there is none."""
    n_most = max(values.shape[1] for values in control_values)
    padded = [
        torch.nn.functional.pad(
            values.cpu(), (0, n_most - values.shape[1]), value=torch.nan
        )
        for values in control_values
    ]
    return torch.stack(padded)


def _texts(trace: Trace, token_ids: Sequence[int]) -> tuple[str, ...]:
    """Return the texts of tokens; their ids where the model has no tokenizer."""
    tokenizer = getattr(trace.model, "tokenizer", None)
    if tokenizer is None:
        return tuple(str(token) for token in token_ids)
    return tuple(tokenizer.decode([token]) for token in token_ids)


def _components(
    trace: Trace, layer: int, position: int
) -> tuple[Float[Tensor, "n_components d"], tuple[str, ...]]:
    """Return what each component before a block wrote at one token, and its label.

    The last, "rest", is what the stream has beside them.
    """
    model = bridge_of(trace.model)
    assert trace.tokens is not None
    tokens = trace.tokens.to(next(model.parameters()).device)
    # As it was traced: a model whose weights are on disk has them only while it runs.
    with torch.no_grad(), own_arithmetic(model):
        _, cache = model.run_with_cache(tokens[None])
        place = f"blocks.{layer}.hook_resid_pre"
        if layer == trace.n_layers:
            place = f"blocks.{layer - 1}.hook_resid_post"
        if not _is_same_stream(cache[place][0, position], trace, layer, position):
            raise ValueError(
                "what wrote the stream is not known: in a TransformerBridge around this "
                f"model another stream enters block {layer}"
            )
        # Parts are `[component batch pos d_model]`, of a batch of one.
        parts, labels = cache.decompose_resid(layer, mode="all", return_labels=True)
        rows = dict(zip(labels, parts[:, 0, position], strict=True))
        # Heads are told apart by weights, which must be in memory for that.
        if not trace.is_streamed:
            rows = _split_heads(model, cache, rows, layer, position)
    components = torch.stack(list(rows.values())).to(trace.residual)
    x = trace.residual[layer, position]
    # Biases of attention, for example, are no component of the cache.
    rest = x - components.sum(0)
    stacked = torch.cat([components, rest[None]])
    return stacked, (*rows, "rest")


def _split_heads(
    model: Any, cache: Any, rows: dict[str, Tensor], layer: int, position: int
) -> dict[str, Tensor]:
    """Put heads in the place of attention outputs, where TransformerLens has them.

    Each is what it adds to the stream, through the norm behind attention if the model
    has one (Gemma 2 and 3, OLMo 2).
    """
    # The first block has no head before it.
    if not layer:
        return rows
    try:
        results, labels = cache.stack_head_results(layer, return_labels=True)
    # Where TransformerLens cannot tell heads apart attention stays one component.
    except (AttributeError, KeyError, NotImplementedError, ValueError, RuntimeError):
        return rows
    head_rows = dict(zip(labels, results[:, 0, position], strict=True))
    split: dict[str, Tensor] = {}
    for label, row in rows.items():
        block = label.removesuffix("_attn_out")
        heads = {
            name: head_rows[name] for name in head_rows if name.startswith(f"L{block}H")
        }
        if not label.endswith("_attn_out") or not heads:
            split[label] = row
            continue
        attended = torch.stack(list(heads.values())).sum(0)
        # A norm behind attention scales the sum of all heads: each with the same gain.
        gain = _gain_of_norm(model.blocks[int(block)], attended, row)
        split |= {name: gain * head for name, head in heads.items()}
    return split


def _gain_of_norm(
    block: nn.Module, x: Float[Tensor, " d"], written: Float[Tensor, " d"]
) -> Tensor:
    """Return by what each entry of x is multiplied before it is written: the gain of
    the norm `w ⊙ x / scale` that makes the one of the other; 1 if the block has none.
    """
    # Entries of ± 1 have mean 0 and mean square 1: a norm makes its own weight of them.
    signs = torch.ones_like(x)
    signs[1::2] = -1
    for norm in block.modules():
        if not _is_norm(norm, len(x)) or _is_close(x, written):
            continue
        # So large that ε beside the mean square does not matter.
        w = norm(_LARGE * signs[None, None])[0, 0] / signs
        # The number that the norm divided by is not known: least squares find it.
        per_scale = (w * x) @ written / (w * x).square().sum()
        if _is_close(per_scale * w * x, written):
            return per_scale * w
    return x.new_ones(())


def _is_norm(module: nn.Module, width: int) -> bool:
    """Say whether a module has nothing but a weight for each of so many entries: norms
    of queries and keys have fewer.
    """
    return [parameter.shape for parameter in module.parameters()] == [(width,)]


def _is_same_stream(
    x: Float[Tensor, " d"], trace: Trace, layer: int, position: int
) -> bool:
    """Say whether a row of the stream is that of a trace, up to the rounding of several
    blocks in x's own dtype.
    """
    tolerance = max(_SAME_STREAM, 4 * torch.finfo(x.dtype).eps)
    expected = trace.residual[layer, position]
    return bool((x.to(expected) - expected).norm() <= tolerance * expected.norm())


def _is_close(x: Tensor, expected: Tensor) -> bool:
    tolerance = max(_SAME_ROW, 4 * torch.finfo(x.dtype).eps)
    return bool((x - expected).norm() <= tolerance * expected.norm())
