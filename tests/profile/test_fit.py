"""The regression and the fit, on data whose truth is known."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinipipe.cost import AnalyticCost, MemoryUse, ModelShape, PassTime
from infinipipe.profile.design import Design, halton
from infinipipe.profile.fit import Sample, fit_link, fit_pass, fit_weight
from infinipipe.profile.regression import nonnegative_least_squares, robust_fit
from infinipipe.settings import SettingError

FORWARD = PassTime(
    pair=3e-9,
    context=-1e-9,
    token=2e-6,
    slice=1e-4,
    reach=1e-7,
    chunk=1e-3,
    embedding_token=1e-7,
    head_token=5e-6,
    head_chunk=3e-3,
)
BACKWARD = PassTime(pair=7e-9, context=1e-9, token=4e-6, slice=5e-5, reach=4e-7, resumed=2e-4, chunk=2e-3)
RECOMPUTE = PassTime(pair=3e-9, context=-1e-9, token=2.5e-6, slice=1e-4, chunk=1e-3)
SHAPE = ModelShape(layers=5, hidden=8, intermediate=8, heads=2, kv_heads=2, head_dim=4, vocab=9)
MEMORY = MemoryUse(layer=1, layer_kv=1, layer_input=1, kv=1, dkv=1, message=1)
DESIGN = Design(longest=4096, capacity=2048, smallest=64)


def truth(stage_layers: tuple[int, ...], windows: tuple[int, ...] = ()) -> AnalyticCost:
    return AnalyticCost(
        shape=dataclasses.replace(SHAPE, windows=windows),
        stage_layers=stage_layers,
        forward=FORWARD,
        backward=BACKWARD,
        recompute=RECOMPUTE,
        memory=MEMORY,
        states=(0,) * len(stage_layers),
    )


def samples_of(windows: tuple[int, ...] = ()) -> list[Sample]:
    """Samples with the true seconds, of two layouts."""
    return [*layout_samples((2, 3), windows), *layout_samples((1, 1), windows)]


def layout_samples(stage_layers: tuple[int, ...], windows: tuple[int, ...] = ()) -> list[Sample]:
    cost, samples = truth(stage_layers, windows), []
    for plan in DESIGN.plans(stage_layers):
        replica = plan.replicas[0]
        for stage, actions in enumerate(replica.actions):
            columns = [(action, action.kind.row.cost) for action in actions]
            columns += [(action, "backward") for action in actions if action.kind.row.leaves_behind]
            for action, column in columns:
                chunk, again = replica.chunks[action.chunk], action.kind.row.recomputes
                layers = min(replica.recompute[stage][action.chunk], 1 + action.chunk % 3) if again else 0
                seconds = cost.pass_seconds(column, chunk, stage) + cost.recompute_seconds(chunk, stage, layers)
                ends = (stage == 0, stage == len(stage_layers) - 1)
                own = cost.layer_windows[stage]
                samples.append(Sample(column, chunk, stage_layers[stage], layers, *ends, seconds, own))
    return samples


@given(st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_nonnegative_least_squares_is_optimal(seed: int) -> None:
    rng = np.random.default_rng(seed)
    matrix, target = rng.normal(size=(12, 5)), rng.normal(size=12)
    x = nonnegative_least_squares(matrix, target)
    slope = matrix.T @ (matrix @ x - target)
    assert x.min() >= 0
    assert slope.min() > -1e-8
    assert np.abs(slope[x > 0]).max(initial=0.0) < 1e-8


def test_outliers_do_not_move_the_fit() -> None:
    rng = np.random.default_rng(0)
    matrix = rng.uniform(1, 10, size=(100, 3))
    target = matrix @ [1.0, 2.0, 3.0]
    target[::10] *= 5
    assert robust_fit(matrix, target) == pytest.approx([1, 2, 3], rel=0.02)


def test_noise_that_only_adds_does_not_pull_the_fit_below_the_median() -> None:
    rng = np.random.default_rng(1)
    matrix = rng.uniform(1, 10, size=(2000, 1))
    target = matrix[:, 0] * (1 + rng.exponential(0.3, 2000))
    (slope,) = robust_fit(matrix, target)
    assert 1.15 < slope < 1.35


@pytest.mark.parametrize("windows", [(), (256,), (256, 256, 0)])
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_the_truth_is_found(kind: str, windows: tuple[int, ...]) -> None:
    samples = samples_of(windows)
    fit = fit_pass(samples[::2], samples[1::2], kind)
    expected = {"forward": FORWARD, "backward": BACKWARD}[kind]
    assert fit.held_out.error_p90 < 1e-6
    assert not fit.quality.warnings
    for name in ("pair", "context", "token", "chunk", "reach", "resumed", "head_chunk"):
        assert getattr(fit.time, name) == pytest.approx(getattr(expected, name), rel=1e-3, abs=1e-13), name
    if kind == "backward":
        assert fit.recompute is not None
        assert fit.recompute.token == pytest.approx(RECOMPUTE.token, rel=1e-3)
        assert fit.recompute.pair == pytest.approx(RECOMPUTE.pair, rel=1e-3)


def test_what_dropping_activations_costs_a_forward_is_found() -> None:
    token, chunk = -FORWARD.token / 20, FORWARD.chunk / 4
    samples = []
    for number, sample in enumerate(samples_of()):
        dropped = number % (sample.layers + 1)
        seconds = sample.seconds + dropped * (token * sample.chunk.num_tokens + chunk)
        samples.append(dataclasses.replace(sample, dropped=dropped, seconds=seconds))
    fit = fit_pass(samples[::2], samples[1::2], "forward")
    assert fit.dropping == pytest.approx((token, chunk), rel=1e-2)
    assert fit.time.token == pytest.approx(FORWARD.token, rel=1e-3)
    kept = fit_pass(samples_of(), [], "forward")
    assert kept.dropping == (0.0, 0.0)


def test_the_second_half_of_a_backward_is_found() -> None:
    found = fit_weight(samples_of())
    assert found is not None
    time, quality = found
    assert quality.error_p90 < 1e-6
    assert time.token == pytest.approx(BACKWARD.token / 2)
    assert time.chunk == pytest.approx(BACKWARD.chunk / 4)
    assert fit_weight([sample for sample in samples_of() if sample.column != "backward_weight"]) is None


def test_one_layout_cannot_tell_the_embedding_apart() -> None:
    samples = layout_samples((2, 3))
    fit = fit_pass(samples[::2], samples[1::2], "forward")
    assert fit.held_out.error_p90 < 1e-3
    assert fit.time.embedding_token == 0
    assert fit.time.token == pytest.approx(FORWARD.token + FORWARD.embedding_token / 2, rel=1e-2)


def test_inefficient_small_chunks_are_found() -> None:
    def slower(sample: Sample) -> Sample:
        missing = max(0, 512 - sample.chunk.num_tokens)
        return dataclasses.replace(sample, seconds=sample.seconds + sample.layers * 2e-6 * missing)

    samples = [slower(sample) for sample in samples_of()]
    fit = fit_pass(samples[::2], samples[1::2], "forward")
    assert fit.time.full == 512
    assert fit.time.short == pytest.approx(2e-6, rel=0.01)


def test_what_the_form_cannot_express_is_warned_of() -> None:
    def odd(sample: Sample) -> Sample:
        return dataclasses.replace(sample, seconds=sample.seconds * (2.0 if sample.chunk.context else 1.0))

    samples = [dataclasses.replace(odd(sample)) for sample in samples_of()]
    fit = fit_pass(samples, samples, "forward")
    assert any("context" in warning or "tokens" in warning for warning in fit.quality.warnings), fit.quality


def test_too_few_points_are_refused() -> None:
    samples = samples_of()[:8]
    with pytest.raises(ValueError, match="measure more plans"):
        fit_pass(samples, samples, "backward")


def test_a_link_has_latency_and_bandwidth() -> None:
    link = fit_link([1e3, 1e5, 1e6], [1e-4 + n * 1e-9 for n in (1e3, 1e5, 1e6)])
    assert link.latency == pytest.approx(1e-4)
    assert link.seconds_per_byte == pytest.approx(1e-9)
    assert fit_link([], []).latency == 0


def test_the_design_covers_its_region() -> None:
    plans = DESIGN.plans((2, 2))
    chunks = [chunk for plan in plans for chunk in plan.all_chunks()]
    assert plans == DESIGN.plans((2, 2))
    assert max(max(plan.lengths) for plan in plans) > DESIGN.longest / 2
    assert min(chunk.num_tokens for chunk in chunks) < 4 * DESIGN.smallest
    assert {chunk.kind.value for chunk in chunks} == {"split", "batched", "hybrid"}
    assert max(len(chunk.slices) for chunk in chunks) > 16
    assert max(chunk.context for chunk in chunks) > DESIGN.longest / 3
    assert {layers for plan in plans for row in plan.replicas[0].recompute for layers in row} == {0, 2}


def test_halton_points_are_even() -> None:
    assert [halton(i, 2) for i in (1, 2, 3, 4)] == [0.5, 0.25, 0.75, 0.125]
    points = [halton(i, 3) for i in range(1, 82)]
    assert np.histogram(points, bins=9, range=(0, 1))[0].tolist() == [9] * 9


def test_an_empty_region_is_refused() -> None:
    with pytest.raises(SettingError, match="longest must be at least twice the smallest slice"):
        Design(longest=100, smallest=64)
