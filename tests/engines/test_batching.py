from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_hpc.engines.torch.batching import Batcher
from gyre_hpc.engines.torch.calls import Call, Finish, Stage
from gyre_hpc.engines.torch.forward import forward_logits
from gyre_hpc.engines.weights import read_weights
from gyre_hpc.errors import IllegalTransition
from gyre_hpc.models.shape import read_shape

from .models import PAGE, VOCABULARY, batcher, drain, run, transformers_logprobs

SYSTEM = [(3 * k + 1) % VOCABULARY for k in range(5 * PAGE + 3)]


def check_logprobs(folder: Path, *calls: Call) -> None:
    """Every sampled token carries the log-prob of an undisturbed model."""
    weights = {name: torch.from_numpy(array.copy()) for name, array in read_weights(folder).items()}
    for call in calls:
        if call.sampled:
            table = forward_logits(weights, read_shape(folder), torch.tensor([call.ids]))[0].log_softmax(-1)
            rows = torch.arange(call.prompt_tokens - 1, len(call.ids) - 1)
            expected = table[rows, torch.tensor(call.ids[call.prompt_tokens :])]
            np.testing.assert_allclose(call.logprobs, expected.numpy(), atol=1e-5, err_msg=call.rid)


def check_idle(engine: Batcher) -> None:
    """No call holds a page."""
    assert engine.running == engine.waiting == engine.pool.held == 0


def test_a_repeated_prompt_reuses_its_pages_and_gives_the_same_logprobs(model: Path) -> None:
    engine = batcher(model)
    first, again = (Call(rid, list(SYSTEM), 12, "w0", greedy=True) for rid in ("first", "again"))
    run(engine, first)
    run(engine, again)
    assert (first.cached_tokens, again.cached_tokens) == (0, 5 * PAGE)
    assert again.ids == first.ids
    np.testing.assert_allclose(again.logprobs, first.logprobs, atol=1e-6)
    check_logprobs(model, first, again)


def test_generated_pages_are_shared_with_the_next_turn(model: Path) -> None:
    engine = batcher(model)
    first = Call("first", list(SYSTEM), 3 * PAGE, "w0")
    run(engine, first)
    turn = Call("turn", [*first.ids, 5, 6, 7], 10, "w0")
    run(engine, turn)
    assert turn.cached_tokens == (len(first.ids) - 1) // PAGE * PAGE
    check_logprobs(model, turn)


def test_a_fully_cached_prompt_still_computes_its_last_token(model: Path) -> None:
    engine = batcher(model)
    calls = [Call(f"c{i}", SYSTEM[: 4 * PAGE], 5, "w0") for i in range(2)]
    run(engine, calls[0])
    run(engine, calls[1])
    assert calls[1].cached_tokens == 3 * PAGE
    check_logprobs(model, *calls)


def test_a_common_prompt_submitted_at_once_is_computed_once(model: Path) -> None:
    engine = batcher(model)
    calls = [Call(f"c{i}", [*SYSTEM, i], 4, "w0") for i in range(6)]
    run(engine, *calls)
    assert [call.cached_tokens for call in calls] == [0] + [5 * PAGE] * 5
    assert engine.counters.tokens_prefilled == len(SYSTEM) + 1 + 5 * (len(SYSTEM) + 1 - 5 * PAGE)
    check_logprobs(model, *calls)


def test_namespaces_never_share_a_page(model: Path) -> None:
    engine = batcher(model)
    cached = []
    for namespace in ("w0", "w1", "", "w0", "w1"):
        call = Call("call", list(SYSTEM), 3, namespace)
        run(engine, call)
        cached.append(call.cached_tokens)
    assert cached == [0, 0, 0, 5 * PAGE, 5 * PAGE]


def test_long_prompts_are_prefilled_in_chunks_while_others_decode(model: Path) -> None:
    engine = batcher(model, prefill_tokens=10)
    short = Call("short", [4, 5, 6], 30, "w0")
    engine.submit(short)
    engine.step()
    long = Call("long", [k % VOCABULARY for k in range(95)], 5, "w0")
    engine.submit(long)
    before = short.sampled
    while long.sampled == 0:
        engine.step()
    assert short.sampled - before >= 9
    drain(engine)
    check_logprobs(model, short, long)


def test_a_stop_token_ends_the_call_and_belongs_to_it(model: Path) -> None:
    engine = batcher(model)
    free = Call("free", list(SYSTEM), 12, "w0", greedy=True)
    run(engine, free)
    stop = free.ids[free.prompt_tokens + 4]
    stopped = Call("stopped", list(SYSTEM), 12, "w0", greedy=True, stop_ids=frozenset({stop}))
    run(engine, stopped)
    cut = free.ids.index(stop, free.prompt_tokens)
    assert (stopped.finish, stopped.ids) == (Finish.STOP, free.ids[: cut + 1])
    assert free.finish is Finish.LENGTH


@pytest.mark.parametrize("sampled", [0, 2, 9])
def test_a_cut_call_continues_elsewhere_as_if_undisturbed(model: Path, sampled: int) -> None:
    here, there = batcher(model, seed=1), batcher(model, seed=2)
    cut = Call("cut", list(SYSTEM), 24, "w0")
    other = Call("other", [9, 8, 7], 24, "w0")
    here.submit(other)
    here.submit(cut)
    while cut.sampled < sampled:
        here.step()
    here.abort(cut)
    here.abort(cut)
    assert (cut.finish, cut.sampled) == (Finish.ABORT, sampled)
    rest = Call("rest", list(cut.ids), 24 - sampled, "w0")
    run(there, rest)
    joined = cut.logprobs + rest.logprobs
    assert len(joined) == 24
    np.testing.assert_allclose(joined, transformers_logprobs(model, rest.ids, len(SYSTEM)), atol=1e-5)
    drain(here)
    check_logprobs(model, other)
    check_idle(here)


def test_a_pool_too_small_for_all_calls_retracts_and_recovers(model: Path) -> None:
    engine = batcher(model, pool_tokens=12 * PAGE, capacity=6)
    calls = [Call(f"c{i}", [(i + k) % VOCABULARY for k in range(10)], 60, "w0") for i in range(6)]
    run(engine, *calls)
    assert engine.counters.retractions > 0
    assert all(call.finish is Finish.LENGTH and call.sampled == 60 for call in calls)
    check_logprobs(model, *calls)
    check_idle(engine)


def test_a_call_may_use_the_whole_pool_and_not_more(model: Path) -> None:
    engine = batcher(model, pool_tokens=4 * PAGE)
    largest = Call("largest", [1] * PAGE, 3 * PAGE, "w0")
    run(engine, largest)
    assert largest.sampled == 3 * PAGE
    with pytest.raises(ValueError, match=r"max_new_tokens=25 .* holds 32"):
        engine.submit(Call("too large", [1] * PAGE, 3 * PAGE + 1, "w0"))


@pytest.mark.parametrize(
    ("ids", "budget", "field"),
    [
        ([], 1, "input_ids"),
        ([1, VOCABULARY], 1, "input_ids"),
        ([-1], 1, "input_ids"),
        ([1], 0, "max_new_tokens"),
    ],
)
def test_a_call_that_cannot_be_served_is_refused_by_field(
    model: Path, ids: list[int], budget: int, field: str
) -> None:
    engine = batcher(model)
    with pytest.raises(ValueError, match=field):
        engine.submit(Call("bad", ids, budget, "w0"))
    assert not engine.calls()


def test_weights_changed_under_a_call_show_in_its_spans_and_never_in_shared_pages(
    model: Path, next_model: Path
) -> None:
    engine = batcher(model)
    call = Call("call", list(SYSTEM), 4 * PAGE, "w0")
    engine.submit(call)
    while call.sampled < PAGE + 4:
        engine.step()
    engine.model.load(read_weights(next_model), "next")
    engine.set_version("1", flush=True)
    drain(engine)
    assert call.spans == [("0", 0), ("1", PAGE + 4)]
    prefix = Call("prefix", call.ids[: len(SYSTEM) + PAGE + 4], 1, "w0")
    whole = Call("whole", list(call.ids), 5, "w0")
    run(engine, prefix)
    run(engine, whole)
    assert (prefix.cached_tokens, whole.cached_tokens) == (0, prefix.prompt_tokens // PAGE * PAGE)
    check_logprobs(next_model, prefix, whole)


def test_retracted_calls_recompute_under_the_new_weights(model: Path, next_model: Path) -> None:
    engine = batcher(model)
    calls = [Call(f"c{i}", [*SYSTEM, i], 10, "w0") for i in range(3)]
    for call in calls:
        engine.submit(call)
    while calls[2].sampled < 4:
        engine.step()
    engine.retract_all()
    assert [call.stage for call in engine.calls()] == [Stage.WAITING] * 3
    assert engine.calls() == calls
    engine.flush()
    engine.model.load(read_weights(next_model), "next")
    engine.set_version("1", flush=True)
    held = [call.sampled for call in calls]
    drain(engine)
    for call, before in zip(calls, held, strict=True):
        expected = transformers_logprobs(next_model, call.ids, call.prompt_tokens + before)
        np.testing.assert_allclose(call.logprobs[before:], expected, atol=1e-5)


def test_memory_is_released_only_between_calls_and_comes_back_empty(model: Path) -> None:
    engine = batcher(model)
    call = Call("call", list(SYSTEM), 4, "w0")
    engine.submit(call)
    engine.step()
    with pytest.raises(IllegalTransition, match="1 running"):
        engine.free()
    drain(engine)
    engine.free()
    assert engine.kv.nbytes == 0
    engine.allocate()
    again = Call("again", list(SYSTEM), 4, "w0")
    run(engine, again)
    assert again.cached_tokens == 0
    check_logprobs(model, again)


def test_equal_seeds_sample_equal_tokens(model: Path) -> None:
    outputs = []
    for seed in (5, 5, 6):
        call = Call("call", list(SYSTEM), 20, "w0")
        run(batcher(model, seed=seed), call)
        outputs.append(call.ids)
    assert outputs[0] == outputs[1] != outputs[2]


ACTIONS = st.one_of(
    st.tuples(st.just("submit"), st.integers(0, 3), st.integers(1, 30), st.integers(1, 20)),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("abort"), st.integers(0, 5)),
    st.tuples(st.just("retract")),
    st.tuples(st.just("flush")),
)


@settings(max_examples=40, deadline=None)
@given(
    actions=st.lists(ACTIONS, max_size=25),
    pages=st.integers(8, 16),
    capacity=st.integers(1, 5),
    chunk=st.integers(3, 40),
)
def test_whatever_happens_no_token_is_wrong_lost_or_repeated(
    model: Path, actions: list[tuple[object, ...]], pages: int, capacity: int, chunk: int
) -> None:
    engine = batcher(model, pool_tokens=pages * PAGE, capacity=capacity, prefill_tokens=chunk)
    calls: list[Call] = []
    for action in actions:
        match action:
            case ("submit", int(family), int(length), int(budget)):
                prompt = [(family + k) % VOCABULARY for k in range(length)]
                calls.append(Call(f"c{len(calls)}", prompt, budget, f"w{family % 2}"))
                engine.submit(calls[-1])
            case ("step", int(count)):
                for _ in range(count):
                    engine.step()
            case ("abort", int(index)) if calls:
                engine.abort(calls[index % len(calls)])
            case ("retract",):
                engine.retract_all()
            case ("flush",):
                engine.flush()
    drain(engine)
    check_idle(engine)
    for call in calls:
        assert len(call.logprobs) == call.sampled
        assert call.finish is Finish.ABORT or call.sampled == call.max_new_tokens
    check_logprobs(model, *calls)
