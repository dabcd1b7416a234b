"""Calls as real harnesses make them, over an alphabet so small that everything collides.

Each call is one of: a new root, a continuation of some call, the same with the end of its output trimmed, a branch from
the middle, a sibling of a call (same prompt), an echo of a call's output under another call's context. Calls of several
agents come in any order; each may be lost, delivered in part, constrained, accepted late.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from gyre_hpc.bench.tree import call_record
from gyre_hpc.records import CallRecord, Delivery, LeafRole

IDS = st.integers(0, 2)
KINDS = ("go on", "trimmed", "sibling", "branch", "echo", "go on", "trimmed", "root")
DELIVERIES = (Delivery.COMPLETE, Delivery.PARTIAL, Delivery.COMPLETE, Delivery.PARTIAL, Delivery.NONE)
PLACES = 64
"""More than an output has tokens."""


def behaviour_logprob(call: int, place: int) -> float:
    """A number that names the sampled token, exact in float32."""
    return -(1 + call * PLACES + place) / 4096


def name_of(logprob: float) -> tuple[int, int]:
    """Inverse of `behaviour_logprob`."""
    return divmod(round(-logprob * 4096) - 1, PLACES)


@st.composite
def histories(draw: st.DrawFn, execution: int = 0, most: int = 9) -> list[CallRecord]:
    """Calls of one execution by ordinal; log-probabilities name the sampled tokens."""
    calls: list[CallRecord] = []
    for ordinal in range(draw(st.integers(1, most) | st.just(most))):
        prompt = draw(prompts(calls))
        output = draw(st.lists(IDS, min_size=draw(st.integers(0, 2)), max_size=4))
        twins = [call for call in calls if call.prompt_ids.tolist() == prompt] or calls
        if twins and draw(st.integers(0, 3)) < (1 if twins is calls else 3):
            output = draw(st.sampled_from(twins)).output_ids.tolist()
        delivery = draw(st.sampled_from(DELIVERIES))
        echoed = delivery is Delivery.PARTIAL and draw(st.integers(0, 3)) < 3
        accepted = delivery is Delivery.COMPLETE or echoed
        call = call_record(
            ordinal,
            np.array(prompt, np.int32),
            np.array(output, np.int32),
            role=draw(st.sampled_from(LeafRole)),
            delivery=delivery,
            accepted=accepted,
            constrained=draw(st.integers(0, 7)) == 0,
            execution=execution,
        )
        names = [behaviour_logprob(ordinal, place) for place in range(len(output))]
        calls.append(replace(call, logprobs=np.array(names, np.float32)))
    return calls


@st.composite
def prompts(draw: st.DrawFn, calls: list[CallRecord]) -> list[int]:
    kind = draw(st.sampled_from(KINDS)) if calls else "root"
    delta = draw(st.lists(IDS, min_size=1, max_size=3))
    if kind == "root":
        return delta
    earlier = calls[-1] if draw(st.booleans()) else draw(st.sampled_from(calls))
    prompt, output = earlier.prompt_ids.tolist(), earlier.output_ids.tolist()
    whole = [*prompt, *output]
    if kind == "sibling":
        return prompt
    if kind == "trimmed":
        return [*prompt, *output[: draw(st.integers(0, len(output)))], *delta]
    if kind == "branch":
        return [*whole[: draw(st.integers(0, len(whole) - 1))], *delta]
    if kind == "echo":
        return [*delta, *draw(st.sampled_from(calls)).output_ids.tolist(), *draw(st.lists(IDS, max_size=2))]
    return [*whole, *delta]
