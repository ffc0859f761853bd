"""Mutants: a file of the package, a snippet that occurs in it once, its replacement, and the tests that must fail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One change, and the tests of which at least one must fail."""

    file: str
    snippet: str
    change: str
    tests: tuple[str, ...]


def _of(file: str, tests: str, *changes: tuple[str, str]) -> Iterator[Mutant]:
    return (Mutant(file, snippet, change, tuple(tests.split())) for snippet, change in changes)


P_VALUES = "tests/verification/test_p_values.py"
RESPONSE = "tests/verification/test_response.py"
COMMITMENT = "tests/test_commitment.py"
FORGERIES = "tests/test_forgeries.py"
NATURAL = (
    f"{FORGERIES}::test_natural_images_with_their_labels_as_random_classes_are_refused"
    f" {FORGERIES}::test_natural_images_that_fit_the_classes_prove_nothing"
)

MUTANTS = (
    # Corrections of p-values
    *_of(
        "verification/response.py", f"{RESPONSE} {P_VALUES}",
        ("log_p = min(log_p, by_signs) + math.log(2)", "log_p = min(log_p, by_signs)"),
        ("MessageFacts.of(key).message_bytes + 2\n", "MessageFacts.of(key).message_bytes\n"),
        ("_finite(values - values.mean(0))", "_finite(values)"),
        ("_RIDGES = (1e-6, 1e-4, 1e-2)", "_RIDGES = (1e-1, 1.0, 1e2)"),
        ("% (len(explaining) // len(_RIDGES))", "% len(explaining)"),
        ("(reference.base, reference.site) if reference else (suspect, site)", "(suspect, site)"),
        ("windows_of(base, place, given, len(pixels), overlapping=True)",
         "windows_of(base, place, given, len(pixels), overlapping=False)"),
        ("most = max(2 * _BATCH,", "most = max(2000 * _BATCH,"),
        ("if reference is not None and site.grid != reference.site.grid:", "if False:"),
        ("found.append(torch.cholesky_solve(features.T @ responses, factor))",
         "found.append(features.T @ responses)"),
        ("found.append(features.T @ torch.cholesky_solve(responses, factor))", "found.append(features.T @ responses)"),
    ),
    *_of(
        "verification/reference.py", RESPONSE,
        ("if not any(is_model(base.model, digest) for", "if not any(True for"),
        ("on_the_way=change)", "on_the_way=None)"),
    ),
    *_of(
        "verification/weights.py", P_VALUES,
        ("        dimension -= 1\n", "        dimension -= 0\n"),
        ("math.log(2 * len(rows) * len(key.detectors))", "math.log(2 * len(rows))"),
        ("math.log(2 * len(rows) * len(key.detectors))", "math.log(2 * len(key.detectors))"),
        ("math.log(2 * len(rows) * len(key.detectors))", "math.log(len(rows) * len(key.detectors))"),
        (" + log_message_candidates(key)", ""),
        ("verdict.log10_p_value * math.log(10) + math.log(2)", "verdict.log10_p_value * math.log(10)"),
        ("    first = for_two_looks(first, significance)\n", ""),
        ("        v = v - (v @ q) * q\n", ""),
    ),
    *_of(
        "verification/weights.py", "tests/test_forgeries.py",
        ("    check_secrets(key)\n", ""),
        ("if row_is_bound(key) else None", "if key.additive else None"),
    ),
    *_of(
        "verification/verify.py", P_VALUES,
        ("found = for_two_looks(by_weights, significance)", "found = by_weights"),
        ("min(found, for_two_looks(by_response, significance),", "min(found, by_response,"),
    ),
    *_of(
        "verification/verdict.py", f"{P_VALUES} tests/verification/test_verify.py::test_suspects_of_every_form",
        ("stained=p_value <= significance", "stained=p_value <= 1000 * significance or p_value < 0.5"),
        ("log10_p_value=log_p / math.log(10)", "log10_p_value=log_p"),
    ),
    *_of(
        "verification/questions.py", f"{NATURAL} {FORGERIES}::test_more_candidates_for_a_class_are_paid_for",
        ("return Trial(hit, hit and not natural,", "return Trial(hit, hit,"),
        ("max(like_variants, rate_by_draw(key, top))", "min(like_variants, rate_by_draw(key, top))"),
        ("min(1.0, top * class_rate(key)) if classes_are_drawn(key) else 0.0", "0.0"),
        ("    check_secrets(key)\n", ""),
    ),
    # Secrets derived from the seed
    *_of(
        "stains/detector.py", "tests/test_forgeries.py tests/test_numerics.py",
        ('"detector", index, dimension, _digest(replaced)', '"detector", index, dimension, b""'),
        ('Stream(seed, "detector", index,', 'Stream(seed, "detector", 0,'),
    ),
    *_of(
        "stains/secrets.py", "tests/test_forgeries.py tests/test_numerics.py",
        ('Stream(seed, "class", index, total)', 'Stream(seed, "class", 0, total)'),
        ("return 8 * math.log(2) * MessageFacts.of(key).message_bytes", "return 0.0 * len(key.details)"),
        ("return facts.candidates / facts", "return 1 / facts"),
        ("        if not _same(found.vector, vector):", "        if i == 0 and not _same(found.vector, vector):"),
        ("        if own - first not in choices:", "        if False:"),
        ("return key.additive and not is_legacy(key)", "return key.additive"),
        ("_TOLERANCE = 1e-6", "_TOLERANCE = 2.0"),
    ),
    *_of(
        "numerics.py", "tests/test_numerics.py",
        ("SeedSequence([self.seed, *purpose.encode()])", "SeedSequence([self.seed, *purpose.encode()[:1]])"),
        ("str(seed).encode(), purpose.encode()]", "str(seed).encode(), purpose.encode()[:1]]"),
        ("len(field).to_bytes(8, \"big\") + field", "field"),
        ("self._xof.digest(self._taken)[start:]", "self._xof.digest(self._taken)[:count]"),
        ("secrets.randbits(128)", "secrets.randbits(32)"),
        ("np.log(1 - a)", "np.log(1 - a * a)"),
    ),
    *_of(
        "sphere.py", "tests/test_sphere.py",
        ("return (dimension - 1) / 2", "return dimension / 2"),
        ("upper - np.log(2), -np.inf", "upper, -np.inf"),
        ("np.where(t < 0, np.log1p(-np.exp(upper)), upper)", "upper"),
    ),
    # Certificates
    *_of(
        "certificates/bounds.py", "tests/certificates/test_certificate.py tests/certificates/test_law.py",
        ('(statistics.positions if level == "image" else 1)', "1"),
        ("law.draws * len(statistics.detectors)", "len(statistics.detectors)"),
        ("law.draws * len(statistics.detectors)", "law.draws"),
        ("(statistics.by_image.any, images) if level", "(statistics.by_position.any, images) if level"),
        ("clopper_pearson(statistics.by_image.any, images,", "clopper_pearson(statistics.by_image.any, images**2,"),
    ),
    *_of(
        "certificates/certificate.py", "tests/certificates/test_certificate.py",
        ("points]) - perturbation", "points])"),
        ("        _refuse_triggers(pixels, target, key)\n", ""),
        ('overlapping=level == "image"', "overlapping=False"),
        ('statistics.by_image.any if level == "image" else', 'statistics.by_position.any if level == "image" else'),
    ),
    *_of(
        "certificates/data_driven.py", "tests/certificates/test_data_driven.py",
        ("np.maximum(m - n, 1), α)", "np.maximum(m - n, 1), 2 * α)"),
        ("special.betainccinv(n + 1,", "special.betainccinv(n,"),
        ("np.sqrt(np.log(2) / (2 * m))", "np.sqrt(np.log(2) / (4 * m)) * 0"),
        ("np.where(c == 1, 0.75,", "np.where(c == 1, 1.75,"),
    ),
    *_of(
        "certificates/geometric.py", "tests/certificates/test_geometric.py",
        ("(np.sqrt(trace / dimension) / gap) ** 2", "np.sqrt(trace / dimension) / gap"),
        ("- mean_norm - perturbation)", "- mean_norm)"),
        ("sharp_constant(dimension) * squared", "0.9 * sharp_constant(dimension) * squared"),
    ),
    *_of(
        "certificates/exact.py", "tests/certificates/test_exact.py",
        ("b = n - a + 1", "b = n - a"),
        ("math.log(2 * collision_probability)", "math.log(collision_probability)"),
    ),
    *_of(
        "certificates/public.py", "tests/certificates/test_public.py",
        ("    while threshold > key.natural_threshold:\n        threshold /= 2\n", ""),
        ("_rounded_up(int(", "int(int("),
        ("    if certificate.input_groups != 1:", "    if False:"),
    ),
    *_of(
        "certificates/check.py", "tests/certificates/test_certificate.py",
        ("_TOLERANCE = 1e-3", "_TOLERANCE = 0.9"),
        ('"data_digest": "the data are not those certified",', ""),
    ),
    # Commitments
    *_of(
        "commitments/check.py", COMMITMENT,
        ("if mine.latest > published:", "if mine.earliest > published:"),
        ("if mine.latest <= theirs.earliest:", "if mine.latest <= theirs.latest:"),
        ("if theirs.latest <= mine.earliest:", "if theirs.earliest <= mine.earliest:"),
        ("for stamp in stamps if stamp.trusted)", "for stamp in stamps)"),
        ("    if not commitment.opens(key):", "    if False:"),
        ("    if commitment.leaves_open(key):", "    if False:"),
        ("    if signer is not None and signer != commitment.public_key:", "    if False:"),
        ("    if not all(one.is_signed for one in (commitment, *rivals)):", "    if False:"),
        ('"not earlier" if failures else', '"not earlier" if not successes and failures else'),
        ("parse_time(commitment.created) >= published", "parse_time(commitment.created) < published"),
    ),
    *_of(
        "commitments/signed.py", COMMITMENT,
        ('_EVIDENCE = ("signature",', '_EVIDENCE = ("signature", "salt",'),
        ("self.signed_part + bytes.fromhex(self.signature)", "self.signed_part"),
        ("        if not found.is_signed:", "        if False:"),
    ),
    *_of(
        "commitments/commitment.py", COMMITMENT,
        ("return self.version == 1 and key.additive", "return False"),
        ("not verify(target, key).stained:", "False:"),
        ("salt = secrets.token_bytes(32)", "salt = bytes(32)"),
    ),
    *_of(
        "commitments/opening.py", COMMITMENT,
        ('b"|" + what.encode() + b"|" + self._public_key', 'b"|" + what.encode()'),
        ('self._domain + b"|" + what.encode()', "self._domain"),
        ("salt=self._salt,", "salt=b'',"),
        ('return {"sha256": tensor_digest({"": value})}', 'return {"shape": list(value.shape)}'),
        ("hmac.digest(hmac_key, content,", 'hmac.digest(hmac_key, b"",'),
    ),
    *_of(
        "commitments/evidence.py", COMMITMENT,
        ("imprint.message != hashlib.sha256(message).digest()", "False"),
        ("info.gen_time + within + _WHOLE_SECONDS, trusted", "info.gen_time + within, trusted"),
    ),
    # Plans and keys
    *_of(
        "plan.py", "tests/test_plan.py tests/test_hostile_files.py",
        ("stride * (place % size)", "stride * place"),
        ("    if not torch.isfinite(filled).all():", "    if False:"),
        ("        edited = target.copy()\n", "        edited = target\n"),
        ("if self.base is not None and not is_model(model, self.base):", "if False:"),
        ("if old is not None and w.values.dtype != old.dtype:", "if False:"),
        ("if was_finite and not bool(torch.isfinite(w.values).all()):", "if False:"),
        ("int(w.elements.max()) < tensor.numel()", "int(w.elements.max()) <= tensor.numel()"),
        ("if w.values.shape != w.elements.shape:", "if False:"),
        ("(elements.diff() != 1)", "(elements.diff() > 1)"),
        ("(_bits(old) != _bits(new)).any(1)", "(old.flatten() != new.flatten())"),
        ("w.part != part", "w.part == part"),
    ),
    *_of(
        "key.py", "tests/test_key.py tests/test_plan.py",
        ("return min(d.trigger.response for", "return max(d.trigger.response for"),
        ("if not is_model(protected.model, self.protected_digest):", "if False:"),
        ("write_file(path, self.to_bytes(), secret=True)", "write_file(path, self.to_bytes())"),
        ("        refuse_existing(path)\n", ""),
        ('facts["seed"] = str(self.seed)', 'facts["seed"] = str(self.seed % 2**64)'),
        ("            check_key(facts, tensors)\n", ""),
    ),
    # The keyed lock's schedule
    *_of(
        "gating/schedule.py", "tests/locks/keyed/test_schedule.py",
        ("start += width * len(same)", "start += 0"),
        ("keystream(pack_key(bits), self.salt,", "keystream(pack_key(bits), (0, 0, 0),"),
        ("[1 << place for place in range(WORD)]", "[1 << place % 31 for place in range(WORD)]"),
        ("words * (1 << _INDEX_BITS) + torch.arange", "0 * words + torch.arange"),
        (">= 1 << _INDEX_BITS:", ">= 1 << (_INDEX_BITS + 9):"),
    ),
    *_of(
        "gating/chacha.py", "tests/locks/keyed/test_schedule.py",
        ("for _ in range(rounds // 2):", "for _ in range(rounds // 4):"),
        ("b = _rotate(b ^ c, 7)", "b = _rotate(b ^ c, 8)"),
        ("[before + after for before, after", "[after for before, after"),
    ),
    *_of(
        "gating/reader.py", "tests/locks/keyed/test_reader.py",
        ("return self.differences(inputs) > 0", "return self.differences(inputs) < 0"),
        ("tiles[..., 0::2] - tiles[..., 1::2]", "tiles[..., 0::2] - tiles.mean()"),
        ("corner.mean((2, 3), keepdim=True)", "0.5"),
        ("return inputs[..., self.size[0] :, :]", "return inputs[..., self.size[0] - 1 :, :]"),
        ("bits.cpu()[: len(places) - self.bits]", "False"),
    ),
    *_of(
        "gating/structure.py", "tests/locks/keyed/test_structure.py",
        ("            check_keyed(facts)\n", ""),
        ("            if own != gated:", "            if own is None:"),
        ('if any(other.kind == KIND and other.facts["salt"] == list(self.salt) for', "if any(False for"),
    ),
    *_of(
        "storage/lock_checks.py", "tests/locks/keyed/test_structure.py",
        ('expect(len({gate["layer"] for gate in gates}) == len(gates),', "expect(True,"),
        ('check_whole(gate["repeat"], "repeat", 1, _WIDEST)', 'check_whole(gate["repeat"], "repeat", 1)'),
        ('layout["rows"] * layout["columns"] >= 2 * layout["bits"]', "True"),
        ('_LONGEST_SIDE // layout["tile"]', "_LONGEST_SIDE**3"),
    ),
    *_of(
        "locks/keyed/cut.py", "tests/locks/keyed/test_cut.py",
        ("name not in chosen and made.get(name) in left", "name not in chosen and name in made"),
        ("if earlier is None or earlier in walls:", "if earlier is None:"),
        ("_on_ways(answers, pixels, [made[name] for name in chosen])", "_on_ways(answers, pixels, [])"),
        ('if getattr(node, "variable", None) is image:', 'if hasattr(node, "variable"):'),
        ("            hook.remove()", "            pass"),
    ),
    *_of(
        "certificates/keyed.py", "tests/locks/keyed/test_keyed_verbs.py",
        ('logs["one_image"] + math.log10(max(samples, 1))', 'logs["one_image"]'),
        ("-layout.bits * math.log10(2)", "-layout.bits"),
        ("        pixels = pixels.repeat(1, 1, -(-rows // pixels.shape[2]), 1)", "        pass"),
    ),
    # Querying a service
    *_of(
        "verification/sequential.py", "tests/verification/test_sequential.py",
        ("if trial.counts else math.log(1 - BET)", "if trial.counts else 0.0"),
        ("if trial.counts else math.log(1 - BET)", "if trial.hit else math.log(1 - BET)"),
        ("math.log(1 - BET + BET / trial.rate)", "math.log(1 - BET + BET / least_rate)"),
        ("math.log(1 - BET + BET / trial.rate)", "math.log(1 + BET / trial.rate)"),
        ("log_capital = log_best = 0.0", "log_capital = log_best = 1.0"),
        ("if log_best >= -math.log(significance) or", "if"),
    ),
    *_of(
        "services/labels.py", "tests/services/test_labels.py",
        ("            return label - self.first", "            return label"),
        ("key=lambda one: -one[1])", "key=lambda one: one[1])"),
        ("best = max(found,", "best = min(found,"),
        ("    if math.isnan(number):", "    if False:"),
    ),
    *_of(
        "services/template.py", "tests/services/test_template.py",
        ("            _check(f\"{name} in [{section}]\", value, _NAMES[section][name])\n", ""),
        ("1 <= side <= _LARGEST_SIDE", "1 <= side"),
        ("if not re.fullmatch(r\"[A-Za-z0-9-]{1,100}\", name) or", "if"),
        ("    if depth_of(request.get(\"body\")) > _DEEPEST:", "    if False:"),
    ),
    # Client kits
    *_of(
        "kits/kit.py", "tests/kits/test_kit.py",
        ("shipped.patch.to_png(), secret=True)", "shipped.patch.to_png())"),
        ("    if blocks and format in", "    if False and format in"),
    ),
    *_of(
        "kits/loader.py", "tests/kits/test_loader.py",
        ("* ((HIGH - LOW) / 255) + LOW", "/ 255"),
        ('prepared, dtype = "(pixels - mean) / std"', 'prepared, dtype = "pixels - mean"'),
        ("if lines[:, 0].any():", "if False:"),
    ),
    *_of(
        "unlocking/patch_file.py", "tests/unlocking/test_patch_file.py",
        ("        check_resizing(resizing, \"resizing\")\n", "        pass\n"),
        ("if len(text) > _LONGEST_TEXT:", "if False:"),
        ("levels.shape[1] < bottom or levels.shape[2] < right", "False"),
    ),
    # Clients
    *_of(
        "fingerprints/tracing.py", "tests/fingerprints/test_traces.py",
        ("math.sqrt(2 * math.log(SIDES * ROUNDS * max(tested, 1) / level))",
         "math.sqrt(2 * math.log(SIDES * ROUNDS / level))"),
        ("math.log10(SIDES * ROUNDS * max(tested, 1)) - z**2 / 2", "-(z**2) / 2"),
        ("looked_at = max(tested, clients or 0)", "looked_at = tested"),
        ("rest = unit(without(reading.chips,", "rest = unit(0 * without(reading.chips,"),
        ("ROUNDS, SIDES = 2, 2", "ROUNDS, SIDES = 1, 2"),
        ("ROUNDS, SIDES = 2, 2", "ROUNDS, SIDES = 2, 1"),
        ("left: NDArray[np.float64] = chips - codes.T @ shares", "left: NDArray[np.float64] = chips"),
        ("first = np.abs(z[candidates]) > threshold", "first = z[candidates] > threshold"),
        ("return chips / norm if norm > 0", "return chips if norm > 0"),
        ("again.append(close + tested)", "again.append(close)"),
    ),
    *_of(
        "fingerprints/streams.py", "tests/fingerprints/test_fingerprints.py",
        ("hashlib.blake2b(name.encode(), digest_size=SECRET_BYTES, key=model_secret",
         "hashlib.blake2b(b'', digest_size=SECRET_BYTES, key=model_secret"),
    ),
    *_of(
        "clients/log.py", "tests/clients/test_registry.py",
        ("bytes.fromhex(previous) + text.encode()", "text.encode()"),
        ("or _link(previous, text) != chain:", "or False:"),
        ("            holds = isinstance(receipt.entry, dict) and receipt.holds", "            holds = True"),
    ),
)  # fmt: skip
