"""Section 8 of the design, slow and obvious: one object per token, sets instead of arrays, every choice tried.

Nothing here is shared with `gyre_hpc.trajectories`. A sampled token is named by (call, place in the call's output).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from gyre_hpc.records import CallRecord, Delivery, LeafRole

Name = tuple[int, int]


@dataclass(eq=False)
class Token:
    """One token in one place of the tree; `call` -1: context, and the root."""

    id: int
    call: int
    place: int
    parent: Token | None
    children: list[Token] = field(default_factory=list)
    echoed: bool = False

    def add(self, id: int, call: int = -1, place: int = -1) -> Token:
        self.children.append(Token(id, call, place, self))
        return self.children[-1]

    def path(self) -> list[Token]:
        """From the first token of the prompt to this one."""
        return (self.parent.path() if self.parent else []) + ([self] if self.parent else [])


@dataclass
class Oracle:
    """The calls of one execution, by ordinal."""

    root: Token = field(default_factory=lambda: Token(-1, -1, -1, None))
    calls: list[CallRecord] = field(default_factory=list)
    tips: list[Token] = field(default_factory=list)

    @classmethod
    def of(cls, calls: Iterable[CallRecord]) -> Oracle:
        oracle = cls()
        for call in sorted(calls, key=lambda call: call.ordinal):
            oracle.add(call)
        return oracle

    def add(self, call: CallRecord) -> None:
        """Attach at the longest prefix; of several places accepted output goes first, then the later call."""
        level = [self.root]
        prompt = call.prompt_ids.tolist()
        depth = 0
        while depth < len(prompt):
            below = [child for token in level for child in token.children if child.id == prompt[depth]]
            if not below:
                break
            level, depth = below, depth + 1
        token = max(level, key=lambda t: (t.call >= 0 and self.calls[t.call].accepted, t.call))
        for id in prompt[depth:]:
            token = token.add(id)
        for above in token.path():
            above.echoed = True
        for place, id in enumerate(call.output_ids.tolist()):
            token = token.add(id, len(self.calls), place)
        self.calls.append(call)
        self.tips.append(token)

    def tokens(self) -> list[Token]:
        found: list[Token] = []
        stack = [self.root]
        while stack:
            token = stack.pop()
            found += token.children
            stack += token.children
        return found

    def leaves(self) -> list[Token]:
        return [token for token in self.tokens() if not token.children]

    def is_target(self, token: Token) -> bool:
        """Sampled here, accepted, unconstrained; of a partly delivered call only what came back."""
        if token.call < 0:
            return False
        call = self.calls[token.call]
        return (
            call.accepted and not call.constrained and (call.delivery is not Delivery.PARTIAL or token.echoed)
        )

    def targets(self) -> dict[Name, Token]:
        return {(token.call, token.place): token for token in self.tokens() if self.is_target(token)}

    def role(self, leaf: Token) -> LeafRole:
        """The highest role of the calls that end at the leaf."""
        own = [call.role_hint for call, tip in zip(self.calls, self.tips, strict=True) if tip is leaf]
        return min(own, key=list(LeafRole).index, default=LeafRole.UNKNOWN)

    def explains(self, paths: Sequence[frozenset[Name]], j_max: int) -> bool:
        """Whether some order of draws keeps exactly these sets of targets and then has to stop."""
        return any(self._draws(frozenset(self.targets()), list(paths), j_max))

    def _draws(self, untrained: frozenset[Name], left: list[frozenset[Name]], draws: int) -> Iterator[bool]:
        ways = self._ways(untrained) if draws else []
        if not left:
            yield not ways
        for way in ways:
            if way in left:
                rest = [path for path in left if path != way]
                yield from self._draws(untrained - way, rest, draws - 1)

    def _ways(self, untrained: frozenset[Name]) -> list[frozenset[Name]]:
        """What each leaf of the highest role with untrained targets would train."""
        for role in LeafRole:
            ways = {
                frozenset((t.call, t.place) for t in leaf.path()) & untrained
                for leaf in self.leaves()
                if self.role(leaf) is role
            }
            if ways - {frozenset()}:
                return sorted(ways - {frozenset()}, key=sorted)
        return []


def relative(rewards: Sequence[float], eps: float) -> list[float]:
    """(r - mean) / (std + eps)."""
    mean, std = statistics.fmean(rewards), statistics.pstdev(rewards)
    return [(reward - mean) / (std + eps) for reward in rewards]
