"""Following a channel: from the layer that writes it to the layers that read it.

On its path a channel passes batch norms, activations, pooling, depthwise convolutions, additions and concatenations.
None of these mixes it with other channels of the same map; `stainlock.network.ops` says what each does. At an operation
without a rule the walk stops and records the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum

from torch import fx, nn

from stainlock.errors import UnsupportedOp
from stainlock.network.activations import Activation
from stainlock.network.ops import TO_LAST, Kind, axes_of, op_of
from stainlock.network.trace import TracedPart


class Reason(Enum):
    """Why a channel can't be followed any further; for locks, with what to do about it."""

    RETURNED = "the model returns the channel itself: choose another site"
    GATES = "it gates a product: choose another site"
    MIXED = "it scales the channel depending on others: choose a site after it"
    GROUPED = "a grouped convolution keeps the signal within its group: choose a site after it"
    SHARED = "its weights are used in several places: choose a site after it"
    CORNER_UNSEEN = "its kernel does not reach position (0, 0): choose a site after it"
    CORNER_MOVED = "it moves position (0, 0): choose a site after it"
    OVER_A_MAP = "a dense layer over a map: choose a site after it"
    NOT_SILENT = "it turns a silent signal into a constant: choose a site after it"
    ACTIVATION_UNKNOWN = "its activation has no rule: choose a site after it"
    NO_STATISTICS = "it has no running statistics, so its outputs depend on the whole batch"
    GATED = "a gate would scale the signal: choose a site after it"
    ADDED_TO_ITSELF = "the signal would be added to itself: choose a site after it"
    CANT_BE_SILENCED = "what it adds to the signal can't be silenced: choose a site after it"
    UNREAD = "nothing reads it"
    UNKNOWN = "add an op rule for it, or choose a site after it"


@dataclass(frozen=True)
class Stop:
    """Where a channel can't be followed: the node, its operation, and why."""

    node: str
    op: str
    reason: Reason

    def error(self) -> UnsupportedOp:
        return UnsupportedOp(self.node, self.op, self.reason.value)

    def __str__(self) -> str:
        match self.reason:
            case Reason.RETURNED:
                return "the model's output"
            case Reason.GATES:
                return f"the product {self.node} that it gates"
            case Reason.GROUPED:
                return f"grouped layer {self.node}"
            case Reason.SHARED:
                return f"{self.node}, which other layers use too"
        return f"{self.op} at {self.node}"


def stop_at(part: TracedPart, node: fx.Node, reason: Reason) -> Stop:
    where = part.path(node) if node.op == "call_module" else node.name
    return Stop(where, part.operation(node), reason)


@dataclass(frozen=True)
class Passed:
    """A batch norm or depthwise convolution on a channel's path; channel k of the site is its channel offset + k."""

    module: str
    offset: int = 0


Path = tuple[Passed | Activation, ...]


@dataclass(frozen=True)
class Reader:
    """A layer that reads the channel: channel k is its input ``offset + k·repeat … + repeat − 1``.

    ``path`` lists the operations between the site's own activation and the reader, each of which acts on the channel
    alone. ``merged`` says that something else was added to the channel.
    """

    module: str
    offset: int
    repeat: int
    path: Path = ()
    merged: bool = False

    def inputs(self, channel: int) -> list[int]:
        first = self.offset + channel * self.repeat
        return list(range(first, first + self.repeat))

    @property
    def modules(self) -> list[str]:
        """The names of the modules on the path, and the reader's own."""
        return [*(step.module for step in self.path if isinstance(step, Passed)), self.module]


@dataclass
class Followers:
    """What follows a site's output channels: a batch norm, an activation, and the layers that read them."""

    norm: str | None = None
    activation: Activation | None = None
    readers: list[Reader] = field(default_factory=list)
    stops: list[Stop] = field(default_factory=list)
    merges: list[str] = field(default_factory=list)  # additions on the path


@dataclass(frozen=True)
class _Place:
    """Where the site's channels are: in a node's output, starting at ``offset``, each ``repeat`` values wide."""

    node: fx.Node
    offset: int = 0
    repeat: int = 1
    path: Path = ()
    merged: bool = False
    tokens: bool = False  # channels are on the last axis, as after a Linear layer, instead of the second


def follow(part: TracedPart, site: fx.Node) -> Followers:
    """Walk forward from a site's output until every path ends at a reader or a stop.

    The site's norm and activation are recorded only while there is a single path: an activation on one of two paths
    does not silence what the other reads.
    """
    found = Followers()
    node, alone, shuffled = site, True, False
    tokens = isinstance(part.leaf(site), nn.Linear) and len(part.shapes.get(site, ())) != 2
    while alone and len(node.users) == 1:
        (user,) = node.users
        op = op_of(part, user)
        if op.kind is Kind.NORM and found.norm is None and not (tokens or shuffled):
            found.norm, found.activation = part.path(user), op.activation
            alone = found.activation is None
        elif op.kind is Kind.ACTIVATION:
            found.activation, alone = op.activation, False
        elif op.kind is Kind.PERMUTE and _moves(part, user, tokens=tokens):
            tokens = not tokens
        elif op.kind is Kind.SHUFFLE and not tokens and found.norm is None:
            shuffled = True  # the activation after it acts on each value, wherever that is moved
        elif op.kind is not Kind.NOTHING:
            break
        node = user
    if shuffled:  # a channel is now part of a wider one, which readers share with others: no reader is recorded
        reasons = {Kind.OUTPUT: Reason.RETURNED, Kind.PRODUCT: Reason.GATES, Kind.MIXING: Reason.MIXED}
        users = [(user, op_of(part, user).kind) for user in node.users]
        found.stops += [stop_at(part, u, reasons.get(k, Reason.UNKNOWN)) for u, k in users if k is not Kind.SIZE]
        return found
    pending = [_Place(node, tokens=tokens)]
    seen: set[tuple[fx.Node, int]] = set()
    while pending:
        place = pending.pop()
        for user in place.node.users:
            ahead = [p for p in _step(part, place, user, found) if (p.node, p.offset) not in seen]
            seen.update((p.node, p.offset) for p in ahead)
            pending += ahead
    return found


def _step(part: TracedPart, place: _Place, user: fx.Node, found: Followers) -> Iterator[_Place]:
    """Look at one user of the node: yield where the channels continue, and record where they end."""
    op = op_of(part, user)
    here = replace(place, node=user)
    passed = Passed(part.path(user), place.offset) if op.kind in (Kind.NORM, Kind.DEPTHWISE) else None
    activated = () if op.activation is None else (op.activation,)
    if op.kind is Kind.SIZE:
        return
    if op.kind is Kind.OUTPUT:
        found.stops.append(stop_at(part, user, Reason.RETURNED))
    elif op.kind is Kind.ACTIVATION:
        yield replace(here, path=(*place.path, *activated))
    elif op.kind is Kind.NOTHING:
        yield here
    elif op.kind is Kind.PERMUTE and _moves(part, user, tokens=place.tokens):
        yield replace(here, tokens=not place.tokens)
    elif op.kind is Kind.MIXING:
        found.stops.append(stop_at(part, user, Reason.MIXED))
    elif op.kind is Kind.DENSE and _reads(part, place, user):
        found.readers.append(Reader(part.path(user), place.offset, place.repeat, place.path, place.merged))
    elif place.tokens or op.kind in (Kind.DENSE, Kind.UNKNOWN, Kind.PERMUTE):
        found.stops.append(stop_at(part, user, Reason.UNKNOWN))
    elif op.kind is Kind.GROUPED:
        found.stops.append(stop_at(part, user, Reason.GROUPED))
    elif passed is not None:
        yield replace(here, path=(*place.path, passed, *activated))
    elif (span := op.span(place.node)) is not None:
        if op.kind is Kind.SUM:
            found.merges.append(user.name)
        yield replace(
            here, offset=place.offset * span.repeat + span.offset, repeat=place.repeat * span.repeat,
            merged=place.merged or op.kind is Kind.SUM,
        )  # fmt: skip
    else:
        found.stops.append(stop_at(part, user, Reason.GATES if op.kind is Kind.PRODUCT else Reason.UNKNOWN))


def _moves(part: TracedPart, node: fx.Node, *, tokens: bool) -> bool:
    """Whether a permutation moves channels from the axis they are on to the other one."""
    return (axes_of(part, node) == TO_LAST) is not tokens


def _reads(part: TracedPart, place: _Place, layer: fx.Node) -> bool:
    """A Linear layer reads channels from the last axis, a convolution from a map's second axis."""
    if isinstance(part.leaf(layer), nn.Linear):
        return place.tokens or len(part.shapes.get(place.node, ())) == 2
    return not place.tokens
