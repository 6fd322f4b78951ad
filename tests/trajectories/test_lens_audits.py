"""An audit of lenses: every planted fault is found, and a right lens passes."""

import copy
import dataclasses
import math
from itertools import permutations

import numpy as np
import pytest
import torch

import tiny
import tl_coupling as tlc
from tl_coupling.trajectories import lens_audit, product_lens
from tl_coupling.trajectories.lenses import LensEstimate

N_LAYERS = 3
# Twenty prompts of one kind: eight words, drawn alike.
WORDS = np.random.default_rng(0).integers(3, 95, (20, 8))
PROMPTS = [" ".join(f"w{word}" for word in row) for row in WORDS]
FITTED, HELD_OUT = PROMPTS[:14], PROMPTS[14:]
SKIPPED = 1
# Prompts of random models lie far apart.
ACCURACY = 0.5


def bridge(folder, seed=1, **config):
    original = tiny.huggingface_model(
        "llama", seed=seed, num_hidden_layers=N_LAYERS, **config
    )
    return tiny.bridge(original, folder)


@pytest.fixture(scope="module")
def model(tokenizer_folder):
    return bridge(tokenizer_folder)


def traces_of(model, prompts):
    return [tlc.trace(model, model.to_tokens(prompt)) for prompt in prompts]


def later_lens(model, prompts):
    return product_lens(
        traces_of(model, prompts), tokens="later", skip_first_positions=SKIPPED
    )


@pytest.fixture(scope="module")
def lens(model):
    return later_lens(model, FITTED)


@pytest.fixture(scope="module")
def held_out(model):
    return traces_of(model, HELD_OUT)


def their_lens(model, prompts):
    """TransformerLens's own, which has no digest and does not say its rope."""
    from transformer_lens.tools.analysis import JacobianLens

    return JacobianLens.fit(
        model, prompts, corpus="c", skip_first_positions=SKIPPED, show_progress=False
    )


def test_numbers_are_those_of_their_fits_of_single_prompts(model, lens, held_out):
    singles = [their_lens(model, [prompt]).jacobians for prompt in HELD_OUT]
    audit = lens_audit(lens, held_out)
    n = len(singles)
    for layer in range(N_LAYERS - 1):
        P = np.stack([single[layer].double().numpy() for single in singles])
        L = lens.jacobians[layer].double().numpy()
        M = P.mean(0)
        size = np.linalg.norm(M)
        sigma = math.sqrt(sum(np.linalg.norm(p - M) ** 2 for p in P) / (n - 1))
        relative = sigma / math.sqrt(size**2 - sigma**2 / n)
        expected = {
            "halves": np.linalg.norm(P[::2].mean(0) - P[1::2].mean(0)) / size,
            "spread": relative,
            "distance_from_mean": np.linalg.norm(L - M) / size,
            "expected_distance": sigma * math.sqrt(1 / n + 1 / 14) / size,
            "needed_prompts": max(1, math.ceil((relative / 0.1) ** 2)),
        }
        for name, value in expected.items():
            assert float(getattr(audit, name)[layer]) == pytest.approx(value, rel=1e-3)
        # Of different prompts the mean of inner products is that of the excess.
        pairs = [np.sum((L - P[i]) * (L - P[j])) for i, j in permutations(range(n), 2)]
        excess = np.mean(pairs) / size**2 - (sigma / size) ** 2 / 14
        squares = audit.distance_from_mean**2 - audit.expected_distance**2
        assert float(squares[layer]) == pytest.approx(excess, rel=0.01, abs=1e-4)
        distances = [np.linalg.norm(L - p) / np.linalg.norm(p) for p in P]
        np.testing.assert_allclose(audit.distance[:, layer], distances, rtol=1e-3)
    table = audit.to_dataframe()
    assert len(table) == n * (N_LAYERS - 1)
    assert table.distance.tolist() == audit.distance.flatten().tolist()


@pytest.mark.parametrize(
    "start",
    [0, *(pytest.param(n, marks=pytest.mark.long("audits a lens")) for n in (5, 10))],
)
def test_a_right_lens_passes(model, start):
    """Lenses and audits of prompts drawn alike, ours and theirs, again and again."""
    rotated = PROMPTS[start:] + PROMPTS[:start]
    audited = traces_of(model, rotated[14:])
    for fitted in (later_lens(model, rotated[:14]), their_lens(model, rotated[:14])):
        audit = lens_audit(fitted, audited, accuracy=ACCURACY)
        assert audit.faults == ()
        assert audit.verdict.startswith("Nothing speaks against the lens")
        assert "a mean of 14 of their kind" in audit.verdict
    same_token = product_lens(traces_of(model, rotated[:14]), position=-2)
    assert lens_audit(same_token, audited, accuracy=ACCURACY).faults == ()


def test_of_its_own_prompts_a_lens_is_their_mean(model, lens):
    audit = lens_audit(lens, traces_of(model, FITTED), accuracy=ACCURACY)
    assert audit.faults == ()
    assert audit.of_its_prompts
    assert "it is the mean of these 14 prompts, its own" in audit.verdict
    assert audit.unexplained < 1e-3
    assert torch.allclose(
        audit.prompt_weights, torch.tensor(1 / 14).double(), rtol=0.01
    )
    assert float(audit.distance_from_mean.max()) < 1e-3


def test_other_weights_are_found(model, lens, held_out, tokenizer_folder):
    other = bridge(tokenizer_folder, seed=2)
    with_digest = lens_audit(later_lens(other, FITTED), held_out)
    assert "its weights were others" in with_digest.verdict
    # Without a digest, by the distance alone.
    theirs = lens_audit(their_lens(other, FITTED), held_out, accuracy=ACCURACY)
    assert theirs.facts_that_differ == ()
    (fault,) = theirs.faults
    assert "times as far from these prompts' Jacobians as is expected" in fault


def test_another_rope_is_found(model, held_out, tokenizer_folder):
    other = bridge(tokenizer_folder, rope_theta=10.0)
    assert (
        tlc.trace(other, "w3").provenance["weights_digest"]
        == (held_out[0].provenance["weights_digest"])
    )
    audit = lens_audit(later_lens(other, FITTED), held_out)
    assert "its rotary embedding was another" in audit.verdict
    # Their lenses do not say it. Nor does the distance from so few prompts...
    theirs = their_lens(other, FITTED)
    passed = lens_audit(theirs, held_out, accuracy=ACCURACY)
    assert passed.faults == ()
    # ... which the verdict says: it moves the maps by less than can be seen.
    mean = np.mean([their_lens(model, FITTED).jacobians[0].numpy()], 0)
    change = np.linalg.norm(theirs.jacobians[0].numpy() - mean) / np.linalg.norm(mean)
    assert change < float(passed.detectable.min())
    assert f"by more than {float(passed.detectable.min()):.0%} of its" in passed.verdict
    # The very prompts of the lens do, whether they are said to be that or not.
    for of_its_prompts in (True, None):
        audit = lens_audit(
            theirs,
            traces_of(model, FITTED),
            of_its_prompts=of_its_prompts,
            accuracy=ACCURACY,
        )
        assert audit.of_its_prompts
        (fault,) = audit.faults
        left = f"up to {float(audit.distance_from_mean.max()):.1%} of it is not in"
        assert left in fault
        assert "another rotary embedding" in fault
        assert float(audit.distance_from_mean[0]) == pytest.approx(change, rel=0.01)


@pytest.mark.long("four prompts of SmolLM2")
def test_another_rope_is_found_in_trained_weights():
    """The rotary embedding's base is a tenth, and the configuration does not say so."""
    model = tlc.load_model("smollm2-135m")
    prompts = ["The capital of France is", "She opened the door and saw"]
    own_traces = [tlc.trace(model, prompt) for prompt in prompts]
    angles = model.original_model.model.rotary_emb.inv_freq
    own_angles = angles.clone()
    angles.copy_(own_angles * 10 ** (torch.arange(len(angles)) / len(angles)))
    turned = product_lens(tlc.trace(model, prompt) for prompt in prompts)
    angles.copy_(own_angles)
    audit = lens_audit(turned, own_traces, of_its_prompts=True, accuracy=1.0)
    assert audit.facts_that_differ == ()
    assert "is not in the mean of its own prompts" in audit.verdict
    # Ten times what is left for rounding.
    assert float(audit.distance_from_mean[0]) > 10 * float(audit.farthest[0])


def f_quantile(p, n_directions, n, n_draws=200_000):
    """Of the F distribution, from its definition: of a ratio of mean squares."""
    rng = np.random.default_rng(0)
    above = rng.chisquare(n_directions, n_draws) / n_directions
    below = rng.chisquare(n_directions * (n - 1), n_draws) / (n_directions * (n - 1))
    return np.quantile(above / below, p)


def test_how_far_a_right_lens_may_lie(model, lens, held_out):
    """Once in a thousand audits, shared by the layers."""
    audit = lens_audit(lens, held_out)
    level = 0.001 / (N_LAYERS - 1)
    for layer, D in enumerate(audit.n_directions.tolist()):
        expected = float(audit.expected_distance[layer])
        farthest = expected * math.sqrt(f_quantile(1 - level, D, len(held_out)))
        assert float(audit.farthest[layer]) == pytest.approx(farthest + 1e-3, rel=0.05)
        change = math.sqrt(farthest**2 - expected**2)
        assert float(audit.detectable[layer]) == pytest.approx(change, rel=0.1)
    few = lens_audit(lens, held_out[:3], accuracy=1.0)
    assert few.n_directions.isnan().all()
    assert few.farthest.isinf().all()
    assert "3 prompts do not tell: audit it with 4 or more" in few.verdict


@pytest.fixture(scope="module")
def singles(model):
    """Matrices of sixty prompts, as lenses of one prompt each."""
    words = np.random.default_rng(1).integers(3, 95, (60, 8))
    prompts = [" ".join(f"w{word}" for word in row) for row in words]
    return [later_lens(model, [prompt]).jacobians for prompt in prompts]


@pytest.fixture
def audited(monkeypatch, model, lens, singles):
    """Audit the mean of some prompts with others, whose matrices are known."""
    trace = tlc.trace(model, HELD_OUT[0])

    def audit(fitted, chosen, change=0.0):
        of_some = copy.deepcopy(lens)
        of_some.n_prompts = len(fitted)
        for layer in of_some.jacobians:
            total = sum(singles[prompt][layer] for prompt in fitted)
            of_some.jacobians[layer] = total / len(fitted)
        of_some.jacobians[0] += change
        matrices = iter(
            torch.stack([singles[prompt][i] for i in of_some.jacobians])
            for prompt in chosen
        )
        monkeypatch.setattr(LensEstimate, "of_prompt", lambda *_: next(matrices))
        # Only their number matters, and that they are not one prompt.
        facts = [{"tokens": [i], "input_digest": str(i)} for i in range(len(chosen))]
        traces = [
            dataclasses.replace(trace, provenance=trace.provenance | fact)
            for fact in facts
        ]
        return lens_audit(of_some, traces, accuracy=1.0)

    return audit


@pytest.mark.parametrize(
    ("n_fitted", "n_audited"),
    [
        (14, 14),
        pytest.param(40, 6, marks=pytest.mark.long("fits many lenses")),
        pytest.param(5, 30, marks=pytest.mark.long("audits many lenses")),
    ],
)
def test_right_lenses_are_not_refused(audited, singles, n_fitted, n_audited):
    """Forty draws of prompts for the lens and for its audit."""
    n_far = 0
    for seed in range(40):
        order = np.random.default_rng(seed).permutation(len(singles))
        fitted, chosen = order[:n_fitted], order[n_fitted : n_fitted + n_audited]
        audit = audited(fitted, chosen)
        assert not audit.of_its_prompts
        n_far += bool((audit.distance_from_mean > audit.farthest).any())
    assert n_far <= 1


def test_a_change_that_is_detectable_is_found(audited, singles):
    """It is below twice the expected distance, where the threshold was before."""
    fitted, chosen = range(30), range(30, 60)
    right = audited(fitted, chosen)
    assert right.faults == ()
    change = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    size = np.linalg.norm(np.mean([singles[prompt][0] for prompt in chosen], 0))
    change *= 1.2 * float(right.detectable[0]) * size / change.norm()
    wrong = audited(fitted, chosen, change)
    assert "at layer 0 it lies up to" in wrong.verdict
    assert float(wrong.distance_from_mean[0] / wrong.expected_distance[0]) < 2


def test_too_few_prompts_are_found(model, held_out):
    one = later_lens(model, FITTED[:1])
    audit = lens_audit(one, held_out, accuracy=0.01)
    (fault,) = audit.faults
    assert fault.startswith("its 1 prompts are too few for")
    needed = int(audit.needed_prompts.max())
    assert f"needs up to {needed}" in fault
    assert needed == math.ceil((float(audit.spread.max()) / 0.01) ** 2)
    # It says that it is of many.
    one.n_prompts = 1000
    assert "fewer prompts than it says" in lens_audit(one, held_out).verdict


def test_prompts_that_show_no_common_map_say_so(model):
    """Two that are each other's opposites have a mean of zero, and noise alone."""
    lens = later_lens(model, FITTED[:2])
    audit = lens_audit(lens, traces_of(model, FITTED[:2]), accuracy=0.1)
    changes = {"spread": torch.tensor([torch.inf, 0.09]).double()}
    noise = dataclasses.replace(audit, **changes)
    assert "needs more than 2 audited ones can tell" in noise.verdict
    assert noise.needed_prompts.tolist() == [math.inf, 1]


def test_half_the_prompts_are_found(model):
    half = later_lens(model, FITTED[::2])
    half.n_prompts = len(FITTED)
    audit = lens_audit(half, traces_of(model, FITTED))
    assert "it is made of 7 of these 14 prompts, and says 14" in audit.verdict
    expected = torch.tensor([1 / 7, 0.0] * 7).double()
    assert torch.allclose(audit.prompt_weights, expected, atol=0.01)


def test_what_cannot_be_audited_is_refused(model, lens, held_out, tokenizer_folder):
    with pytest.raises(ValueError, match="at least two traced prompts, got 1"):
        lens_audit(lens, held_out[:1])
    with pytest.raises(ValueError, match="all prompts of the lens, 14, got 6"):
        lens_audit(lens, held_out, of_its_prompts=True)
    with pytest.raises(ValueError, match=r"`accuracy` must lie in \(0, 1\], got 0"):
        lens_audit(lens, held_out, accuracy=0.0)
    with pytest.raises(ValueError, match="longer than 2 tokens"):
        lens_audit(lens, [tlc.trace(model, "w3 w4")] * 2)
    with pytest.raises(TypeError, match="iterable of traces, got str"):
        lens_audit(lens, HELD_OUT)
    of_no_prompts = later_lens(model, FITTED[:1])
    of_no_prompts.n_prompts = 0
    with pytest.raises(ValueError, match=r"must be at least 1, .* got 0: set it to"):
        lens_audit(of_no_prompts, held_out)
    short = later_lens(model, FITTED[:2])
    del short.jacobians[1]
    with pytest.raises(ValueError, match="for each of the layers 0 to 1"):
        lens_audit(short, held_out)
    lens_of_another_kind = later_lens(model, FITTED[:2])
    lens_of_another_kind.metadata["estimator"] = "tuned"
    with pytest.raises(ValueError, match="got 'tuned'"):
        lens_audit(lens_of_another_kind, held_out)


def changed(lens, **changes):
    """Return a copy with other attributes; `metadata` are added to its own."""
    other = copy.deepcopy(lens)
    other.metadata |= changes.pop("metadata", {})
    for name, value in changes.items():
        setattr(other, name, value)
    return other


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_lens_that_is_not_finite_is_refused(lens, held_out, number):
    for layer in lens.jacobians:
        planted = copy.deepcopy(lens)
        planted.jacobians[layer][3, 5] = number
        name = rf"`lens.jacobians\[{layer}\]` has NaN or infinite entries"
        with pytest.raises(ValueError, match=name):
            lens_audit(planted, held_out)
        with pytest.raises(ValueError, match=name):
            tlc.trajectories.entropy_by_depth(held_out[0], planted)
        with pytest.raises(ValueError, match=name):
            tlc.directions.decode(held_out[0], 1, k=1, lens=planted)


@pytest.mark.parametrize(
    "name", ["spread", "distance_from_mean", "expected_distance", "unexplained"]
)
def test_what_is_not_known_speaks_against_a_lens(model, lens, held_out, name):
    """NaN is above no threshold, and below none."""
    audit = lens_audit(lens, held_out, accuracy=ACCURACY)
    assert audit.faults == ()
    # Far from its own prompts it would have another fault.
    changes = {"distance_from_mean": 0 * audit.distance_from_mean, name: math.nan}
    if name != "unexplained":
        changes[name] = 0 * audit.distance_from_mean
        changes[name][1] = math.nan
    for of_its_prompts in (False, True):
        changes["of_its_prompts"] = of_its_prompts
        planted = dataclasses.replace(audit, **changes)
        if of_its_prompts and name == "expected_distance":
            # Of its own prompts nothing is expected but rounding.
            assert planted.faults == ()
            continue
        (fault,) = planted.faults
        assert "is not known at" in fault
        assert "Nothing" not in planted.verdict


def test_prompts_that_do_not_lie_apart_leave_rounding_alone(lens, held_out):
    """As five copies of one prompt do not, with which a lens of zeros passed."""
    audit = lens_audit(lens, held_out, accuracy=ACCURACY)
    nothing = torch.zeros_like(audit.spread)
    alike = {
        "spread": nothing,
        "expected_distance": nothing,
        "n_directions": nothing + math.nan,
    }
    of_zeros = dataclasses.replace(audit, distance_from_mean=nothing + 1, **alike)
    assert "at all layers it lies up to" in of_zeros.verdict
    right = dataclasses.replace(audit, distance_from_mean=nothing + 1e-4, **alike)
    assert right.faults == ()
    zeros = copy.deepcopy(lens)
    for layer in zeros.jacobians:
        zeros.jacobians[layer].zero_()
    with pytest.raises(ValueError, match="one prompt is there twice"):
        lens_audit(zeros, [held_out[0]] * 5)


@pytest.mark.parametrize(
    "fact",
    [
        torch.ones(2),
        object(),
        {1, 2},
        {(1, 2): 3},
        torch.float16,
        b"bytes",
        np.float32(1),
        1j,
    ],
)
def test_metadata_that_are_no_json_are_saved_as_text(lens, held_out, fact, tmp_path):
    audit = lens_audit(changed(lens, metadata={"fact": fact, "rank": 3}), held_out[:2])
    loaded = tlc.trajectories.LensAudit.load(audit.save(tmp_path / "audit.nc"))
    assert isinstance(loaded.provenance["lens"]["fact"], str)
    assert loaded.provenance["lens"]["rank"] == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_prompts": "14"}, "`lens.n_prompts` must be a whole number, .* got '14'"),
        ({"n_prompts": None}, "`lens.n_prompts` must be a whole number, .* got None"),
        (
            {"metadata": {"skip_first_positions": "1"}},
            r"`lens.metadata\['skip_first_positions'\]` must be a whole number, got '1'",
        ),
        (
            {"metadata": {"skip_first_positions": -1}},
            "must be at least 0, got -1",
        ),
        (
            {"metadata": {"estimator": "tl_coupling.product_of_blocks"}},
            r"`lens.metadata\['position'\]` must be a whole number, got None",
        ),
        (
            {"jacobians": {0: [[1.0]], 1: [[1.0]]}},
            "must be a dense tensor of real numbers, got a list",
        ),
        (
            {"jacobians": dict.fromkeys((0, 1), torch.eye(32).to_sparse())},
            "must be a dense tensor of real numbers, got a tensor of layout sparse_coo",
        ),
        (
            {"jacobians": dict.fromkeys((0, 1), torch.ones(32, 5))},
            r"as wide as the model, \[32 32\], got \[32, 5\]",
        ),
    ],
)
def test_a_lens_that_is_none_is_refused_in_a_line(lens, held_out, changes, message):
    with pytest.raises((TypeError, ValueError), match=message) as error:
        lens_audit(changed(lens, **changes), held_out)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("metadata", [None, [], "text"])
def test_metadata_are_a_mapping(lens, held_out, metadata):
    other = copy.deepcopy(lens)
    other.metadata = metadata
    for call in (
        lambda: lens_audit(other, held_out),
        lambda: tlc.trajectories.entropy_by_depth(held_out[0], other),
    ):
        with pytest.raises(TypeError, match=r"`lens\.metadata` must be a mapping"):
            call()
    # What is in it may be of any kind.
    assert lens_audit(changed(lens, metadata={"versions": ["a"]}), held_out).layers
