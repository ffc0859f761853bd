"""The standard staining schemas: a message in weights, in activations, or in outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn

from stainlock.certificates import log_binomial_tail
from stainlock.errors import SiteError, TriggerError
from stainlock.facts import MessageFacts, OutputFacts
from stainlock.key import Detector, Key
from stainlock.network import norms
from stainlock.network.graph import Reader
from stainlock.network.network import Network, Site, input_of, layer_input, respond
from stainlock.network.norms import affine_of
from stainlock.network.ops import Activation
from stainlock.numerics import at, exact, has, input_axis, raw
from stainlock.plan import Plan, Write, write, write_values
from stainlock.stains import message as codec
from stainlock.stains.object_detectors import ClassEvidence, leaking_gradients
from stainlock.stains.secrets import draw_classes, mask_of
from stainlock.target import Target, entries_in, evaluation_mode, logits_in, synthetic_inputs
from stainlock.transmission.changes import usual_changes
from stainlock.trigger import Progress

# Number of steps, and growth of the step size per step. Object detectors need slower growth: large steps saturate the
# activations before the boxes, and gradients vanish there.
_COLUMN_STEPS, _BOX_STEPS = (200, 1.03), (300, 1.01)
_SURE = 1e-6  # the p-value that verification requires
_WELL_HEARD = 0.75  # quantile, over the layer's channels, of how strongly they pass a signal on
# Fraction of an object detector's classes that are drawn as candidates for each trigger. The candidate with the largest
# logit is taken, and the fraction is the rate in the p-value.
_DETECTOR_CANDIDATES = 1 / 10
# The probability that the wanted class must reach on its trigger; a box needs less to be the strongest.
_CONFIDENT, _CONFIDENT_BOX = 0.9, 0.7
# Changed copies of triggers that must get the class of a robust stain too, if their response is at least this fraction
# of the trigger's.
_COPIES, _EXCITED = ("JPEG 95", "JPEG 50", "cropped by 3"), 0.62


def activation_writes(
    network: Network,
    site: Site,
    v: Tensor,
    response: float,
    present: Tensor,
    message: str,
    mask: codec.Mask,
) -> list[Write]:
    """Activation schema: a multiple of v is added to each neuron whose pre-activation at x* has the wrong sign or is
    too small. For the trigger, the signs of the layer then spell the message."""
    if site.kind == "transposed" or site.groups > 1:
        raise SiteError(f"{site.name} can't carry the activation schema: expected a Linear or an ungrouped Conv2d")
    model = network.target.model
    signs = torch.from_numpy(codec.encode(message, mask))
    margin = _margin(network, site)
    wanted = torch.where(signs * present >= margin, present, signs * margin)
    g = affine_of(model.get_submodule(site.norm)).g if site.norm else torch.ones(site.channels, dtype=torch.float64)
    dead = g.abs() < 1e-6 * g.abs().median()
    weight = exact(site.layer(model), "weight")
    writes = []
    for k in ((wanted != present) & ~dead).nonzero().squeeze(1).tolist():
        u = weight[k].flatten() + (wanted[k] - present[k]) / (g[k] * response) * v
        writes.append(write(model, f"{site.name}.weight", (k,), u.view(weight.shape[1:]), "detector"))
    return writes


def _margin(network: Network, site: Site) -> float:
    """Twice the typical standard deviation of the layer's pre-activations, so that noise does not flip signs."""
    model = network.target.model
    if site.norm is not None:
        return 2 * float(affine_of(model.get_submodule(site.norm)).deviation.median())
    inputs = synthetic_inputs(network.target, 4, torch.Generator().manual_seed(0))
    with evaluation_mode(model), torch.no_grad():
        output = site.layer(model)(layer_input(network.target, site, inputs))
    return 2 * float(output.double().std())


def read_weights_message(rows: Tensor, key: Key) -> codec.Reading:
    """The message in the row that is nearest to the detector, whatever its channel, scale and sign."""
    cosines = torch.nn.functional.normalize(rows.double(), dim=1) @ key.detectors[0].vector.double()
    best = int(cosines.abs().argmax())
    values = (rows[best].double() * torch.sign(cosines[best])).numpy()
    return codec.decode(values, MessageFacts.of(key).message_bytes, mask_of(key, len(values)))


def read_activation_message(levels: Tensor, key: Key) -> codec.Reading:
    """The message in the signs of the layer's pre-activations for the trigger."""
    return codec.decode(levels.double().numpy(), MessageFacts.of(key).message_bytes, mask_of(key, len(levels)))


def single_reader(network: Network, site: Site) -> Reader | None:
    """The only reader of the site's channels; None if there are others."""
    if site.stops or len(site.readers) != 1:
        return None
    reader = site.readers[0]
    return None if reader.merged or reader.module not in network.sites else reader


def heard_channels(network: Network, site: Site, channels: list[int], position: tuple[int, ...]) -> list[int]:
    """Channels whose depthwise layers after the site pass a detector's signal at this position on strongly."""
    reader = single_reader(network, site)
    if reader is None or len(position) != 2 or reader.offset or reader.repeat != 1:
        return channels
    if not reader.modules[:-1]:
        return channels
    heard = carried(network, site, reader, (position[0], position[1]))
    return [k for k in channels if heard[k] >= heard.quantile(_WELL_HEARD)]


def output_writes(
    network: Network,
    site: Site,
    detectors: Sequence[Detector],
    plan: Plan,
    classes: int | Sequence[int] | None,
    seed: int,
    progress: Progress | None,
    *,
    robust: bool = False,
) -> tuple[list[Write], OutputFacts]:
    """Output schema: make column k of the layer that reads the detector a vector for which the model gives the class.

    All columns are found together by gradient descent. Natural inputs are not affected, since the detector is
    silent. If a batch norm on the path turns that silence into a constant, the reader's bias subtracts it.
    With ``robust``, changed copies of triggers must get the class too, if they still excite their detectors.
    """
    target = network.target
    reader = single_reader(network, site)
    if reader is None:
        where = site.stops[0] if site.stops else "something other than a single layer"
        raise SiteError(f"{site.name} can't carry the output schema: its channels are read by {where}")
    stained = plan.apply(target)
    pixels, owners = _with_copies(target, site, detectors) if robust else _as_they_are(target, detectors)
    name = f"{reader.module}.weight"
    layer = stained.model.get_submodule(reader.module)
    axis = input_axis(layer)
    inputs = [i for d in detectors for i in reader.inputs(d.channel)]
    detects = stained.normalises
    evidence = ClassEvidence(stained, pixels) if detects else None
    suffix = _Suffix(network, stained, reader.module, evidence.inputs if evidence else stained.normalise(pixels))
    places = torch.tensor(inputs, device=raw(layer, "weight").device)
    silence = _Silence(network, stained, reader.module, axis, places)

    def answers(weight: Tensor) -> Tensor:
        output = suffix.run(weight, silence.heard(weight))
        if evidence is not None:
            return evidence.logits(output)
        output = logits_in(output if stained.part else stained.named_output(output))
        if not isinstance(output, Tensor) or output.dim() != 2:
            names = ", ".join(name for name, _ in entries_in(output))
            came = f", got {names}: name one with --output (in Python Target(output=...))" if names else ""
            raise SiteError(f"the output schema needs a classifier: expected logits of shape (N, classes){came}")
        return output

    if evidence is not None:
        own = raw(layer, "weight").detach()
        with torch.no_grad():
            push = 10 * own.std() * own.index_select(axis, places).sign()
            pushed = [own.index_add(axis, places, push, alpha=way) for way in (-1, 1)]
            evidence.see(*(suffix.run(w, silence.heard(w)) for w in (own, *pushed)))
    logits = answers(raw(layer, "weight"))
    total = logits.shape[1] - detects  # an object detector's class 0 is the background
    candidates = math.ceil(_DETECTOR_CANDIDATES * total) if detects and classes is None else 1
    chosen_classes = _wanted_classes(classes, logits[: len(detectors)], seed, total, candidates)
    wanted = chosen_classes[owners.to(logits.device)]
    weight = raw(layer, "weight")
    columns = weight.index_select(axis, places).clone().requires_grad_(True)
    optimiser = torch.optim.Adam([columns], lr=float(weight.std()))
    # Triggers can push logits very far; steps grow until the columns compensate for that.
    steps, larger = _BOX_STEPS if detects else _COLUMN_STEPS
    growth = torch.optim.lr_scheduler.ExponentialLR(optimiser, larger)
    for step in range(steps):
        with leaking_gradients(stained.model) if detects else nullcontext():
            logits = answers(weight.index_copy(axis, places, columns))
        chosen = logits.softmax(1).gather(1, wanted[:, None])
        if float(chosen.detach().min()) > (_CONFIDENT_BOX if detects else _CONFIDENT):
            break
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(logits, wanted, reduction="sum").backward()
        optimiser.step()
        growth.step()
        if progress:
            progress(step + 1, steps)
    missed = int((logits.argmax(1) != wanted)[: len(detectors)].sum())
    # An object detector's boxes can't be given every class; triggers that missed theirs stay, and count as misses.
    sure = detects and classes is None and _proves(len(detectors) - missed, len(detectors), candidates / total)
    if missed and not sure:
        raise TriggerError(
            f"{missed} of {len(detectors)} triggers could not be given their class at {site.name}:"
            f" use {'more' if detects and classes is None else 'a later site or fewer'} triggers"
        )
    index: list[list[int | None]] = [[None] * axis + [i] for i in inputs]
    solved = columns.detach().double().cpu()
    writes = [write(target.model, name, where, solved.select(axis, i), "detector") for i, where in enumerate(index)]
    writes += silence.taken_back(weight.index_copy(axis, places, columns.detach()))
    facts = OutputFacts(
        classes=chosen_classes.tolist(), total_classes=total if classes is None else logits.shape[1],
        random_classes=classes is None, candidates=candidates,
    )  # fmt: skip
    return writes, facts


def _as_they_are(target: Target, detectors: Sequence[Detector]) -> tuple[Tensor, Tensor]:
    """The triggers' pixels, and the index of the detector that each belongs to."""
    return torch.cat([d.trigger.pixels(target) for d in detectors]), torch.arange(len(detectors))


def _with_copies(target: Target, site: Site, detectors: Sequence[Detector]) -> tuple[Tensor, Tensor]:
    """The same, followed by changed copies of the triggers if their detectors still respond to them."""
    pixels, owners = _as_they_are(target, detectors)
    vectors = torch.stack([d.vector for d in detectors])
    full = torch.tensor([d.trigger.response for d in detectors])
    found, theirs = [pixels], [owners]
    changes = usual_changes(target)
    for change in _COPIES:
        copies = changes[change](pixels)
        with evaluation_mode(target.model), torch.no_grad():
            groups = [site.group_of(d.channel) for d in detectors]
            features = layer_input(target, site, copies)
            maps = [respond(site, target, features[i, None], vectors[i, None], g) for i, g in enumerate(groups)]
        excited = torch.stack([own.max() for own in maps]).cpu() >= _EXCITED * full
        found.append(copies[excited])
        theirs.append(owners[excited])
    return torch.cat(found), torch.cat(theirs)


def _proves(hits: int, count: int, rate: float) -> bool:
    """Whether ``hits`` triggers with the right class are a proof, if each gets it by chance at this rate."""
    return float(log_binomial_tail(hits, count, rate)) <= math.log(_SURE)


def _wanted_classes(
    classes: int | Sequence[int] | None, logits: Tensor, seed: int, total: int, candidates: int
) -> Tensor:
    """The classes that the seed draws, for which a p-value needs no assumption, or the owner's own.

    An object detector's boxes can't be given every class. So several candidates are drawn, the one with the largest
    logit is taken, and the p-value is corrected for their number.
    """
    count, most = logits.shape
    if classes is None:
        drawn = torch.tensor([draw_classes(seed, i, total, candidates) for i in range(count)], device=logits.device)
        drawn = drawn + (most - total)
        chosen = drawn.gather(1, logits.gather(1, drawn).argmax(1, keepdim=True))[:, 0].tolist()
    else:
        chosen = [classes] * count if isinstance(classes, int) else [int(c) for c in classes]
    if len(chosen) != count:
        raise ValueError(f"expected one class or {count}, got {len(chosen)}")
    if any(not 0 <= c < most for c in chosen):
        raise ValueError(f"expected classes from 0 to {most - 1}, got {chosen}")
    return torch.tensor(chosen, device=logits.device)


class _Silence:
    """The level of silent detectors at the layer that reads them: usually 0, otherwise what batch norms map 0 to."""

    def __init__(self, network: Network, stained: Target, module: str, axis: int, places: Tensor) -> None:
        self.model, self.module, self.axis, self.places = stained.model, module, axis, places
        layer = stained.model.get_submodule(module)
        self.norm = network.sites[module].norm if module in network.sites else None
        probes = synthetic_inputs(stained, 1, torch.Generator().manual_seed(7))
        with evaluation_mode(stained.model), torch.no_grad():
            given = input_of(stained, module, probes)
        channels = given.movedim(-1 if isinstance(layer, nn.Linear) else 1, 0).flatten(1)
        self.level = channels[places.cpu().to(channels.device)].median(1).values
        self.before = raw(layer, "weight").detach().clone()
        self.written = has(layer, "bias") or self.norm is not None

    def heard(self, weight: Tensor) -> Tensor | None:
        """How much silent detectors change each of the reader's outputs if its weight is replaced by this one."""
        if not self.written:
            return None
        more = (weight - self.before).index_select(self.axis, self.places).movedim(self.axis, 0)
        return torch.einsum("i,io->o", self.level, more.flatten(2).sum(2) if more.dim() > 2 else more)

    def taken_back(self, weight: Tensor) -> list[Write]:
        if (more := self.heard(weight)) is None:
            return []
        layer, more = self.model.get_submodule(self.module), more.detach().double().cpu()
        if has(layer, "bias"):
            return [write(self.model, f"{self.module}.bias", (None,), exact(layer, "bias") - more, "detector")]
        values = norms.expecting_less(self.model.get_submodule(str(self.norm)), -more)
        return write_values(self.model, str(self.norm), (None,), values, "detector")


class _Suffix:
    """The analysed part from one layer on, for fixed inputs: everything before that layer is computed once."""

    def __init__(self, network: Network, stained: Target, module: str, inputs: Tensor) -> None:
        part = network.parts[0]
        if len(network.parts) > 1 or not part.runs or (stained.part and not stained.normalises):
            raise SiteError("the output schema needs a classifier that torch.fx can trace whole")
        self.node = next(n for n in part.graph.nodes if n.op == "call_module" and part.path(n) == module)
        self.layer = stained.model.get_submodule(module)
        self.interpreter = fx.Interpreter(stained.traced, garbage_collect_values=False, graph=part.graph)
        with evaluation_mode(stained.model), torch.no_grad():
            self.interpreter.run(inputs, *(() if stained.part else stained.extra_inputs))
        later = {self.node}
        for node in part.graph.nodes:
            if any(n in later for n in node.all_input_nodes):
                later.add(node)
        self.known = {n: v for n, v in self.interpreter.env.items() if n not in later}
        self.model = stained.model

    def run(self, weight: Tensor, less: Tensor | None = None) -> Any:
        """The output with another weight of the layer, and with ``less`` subtracted from the layer's outputs."""
        source: Any = self.node.args[0]
        with evaluation_mode(self.model):
            output = torch.func.functional_call(self.layer, {"weight": weight}, (self.known[source],))
            if less is not None:
                output = output - (less if isinstance(self.layer, nn.Linear) else less[:, None, None])
            return self.interpreter.run(initial_env={**self.known, self.node: output})


_FIRED = 10.0  # pre-activation of a firing detector in `carried`, where its exact value does not matter


def carried(network: Network, site: Site, reader: Reader, position: tuple[int, ...]) -> Tensor:
    """How much of a detector's signal at one position would reach a reader, for each channel. A depthwise kernel or a
    batch norm on the path may flip its sign, and an activation may then remove it."""
    assert site.activation is not None
    model, maps = network.target.model, torch.full((2, site.channels, *site.grid), site.activation.rest)
    at(maps[1], position).fill_(float(site.activation.function(torch.tensor(_FIRED))))
    maps = maps.to(network.target.device, network.target.dtype)
    with evaluation_mode(model), torch.no_grad():
        for step in reader.path:
            maps = step.function(maps) if isinstance(step, Activation) else model.get_submodule(step.module)(maps)
    heard: Tensor = (maps[1] - maps[0]).flatten(1).norm(dim=1).double().cpu()
    return heard
