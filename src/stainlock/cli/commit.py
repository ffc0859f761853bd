"""`stainlock commit`: commit to a key and a model now without revealing them, and prove it later."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stainlock.cli.help import Verb
from stainlock.cli.options import (
    FILE,
    NO_CODE,
    Code,
    code_options,
    load_model,
    output_options,
    seed_option,
    weights_option,
)
from stainlock.cli.outputs import Outputs
from stainlock.cli.report import Report

if TYPE_CHECKING:
    from torch import Tensor

    from stainlock.commitments.commitment import Commitment
    from stainlock.commitments.signed import Signed
    from stainlock.commitments.signing import Signer
    from stainlock.target import Target

_GUESSABLE = 2**64  # smaller seeds were chosen by a person; drawn ones have 128 bits


@click.command("commit", cls=Verb)
@click.argument("model", required=False)
@click.option("--key", "key_file", type=FILE, metavar="FILE", help="The owner's key.")
@click.option(
    "--out", type=FILE, metavar="FILE.json", help="Where to write the commitment. It reveals nothing: publish it."
)
@click.option("--signing-key", type=FILE, metavar="FILE.pem", help="Ed25519 private key to sign with.")
@click.option(
    "--new-signing-key", type=FILE, metavar="FILE.pem", help="Create a signing key (secret), and sign with it."
)
@click.option("--statement", metavar="TEXT", help="One line of public text to include and sign.")
@click.option("--timestamp-request", "request", type=FILE, metavar="FILE.tsq", help="Also write an RFC 3161 request"
              " to send to a timestamp authority.")  # fmt: skip
@click.option("--model-signature", "signature", nargs=2, type=FILE, metavar="DIR FILE.sig", help="Also write"
              " the commitment as an in-toto statement about the bundle in DIR, for model_signing.")  # fmt: skip
@click.option("--ec-key", type=FILE, metavar="FILE.pem", help="With --model-signature: elliptic-curve private key to"
              " sign it with.")  # fmt: skip
@click.option("--registry", type=FILE, metavar="FILE", help="Instead of MODEL: commit to the current audit log of a"
              " client registry.")  # fmt: skip
@click.option("--attach", type=FILE, metavar="FILE.json", help="Instead of MODEL: add evidence of its date to this"
              " existing commitment; the result goes to --out.")  # fmt: skip
@click.option("--timestamp", "responses", type=FILE, multiple=True, metavar="FILE.tsr", help="With --attach: the"
              " timestamp authority's response; repeat for several.")  # fmt: skip
@click.option("--log-entry", "entries", type=FILE, multiple=True, metavar="FILE.json", help="With --attach: a"
              " transparency log's entry with the commitment's digest. It is stored, not checked.")  # fmt: skip
@code_options
@weights_option
@seed_option()
@output_options
def command(
    report: Report,
    model: str | None,
    key_file: Path | None,
    out: Path | None,
    signing_key: Path | None,
    new_signing_key: Path | None,
    statement: str | None,
    request: Path | None,
    signature: tuple[Path, Path] | None,
    ec_key: Path | None,
    registry: Path | None,
    attach: Path | None,
    responses: tuple[Path, ...],
    entries: tuple[Path, ...],
    weights: str | None,
    seed: int | None,
    code: Code,
) -> None:
    """Sign a commitment to a key and MODEL that reveals neither.

    MODEL is stained with the key. Commit before anyone else sees MODEL. The date only counts once others vouch for it:
    send the request to a timestamp authority and --attach the response. `stainlock verify --commitment` checks it all.

    With --registry the commitment is to the audit log of a client registry: no entry up to now can change unnoticed.
    """
    from stainlock.storage.durable import write_file

    if (signature is None) != (ec_key is None):
        raise ValueError("expected --model-signature and --ec-key together")
    if signature is not None and registry is not None:
        raise ValueError("expected a commitment to a model with --model-signature, not to a registry's log")
    given = {"MODEL": model, "--key": key_file, "--signing-key": signing_key, "--new-signing-key": new_signing_key,
             "--statement": statement, "--weights": weights, "--model": code.model,
             "--registry": registry}  # fmt: skip
    if attach is not None:
        if surplus := [name for name, value in given.items() if value is not None]:
            raise ValueError(f"a signed commitment can't be changed: leave out {surplus[0]} with --attach")
        if not (responses or entries or request or signature):
            raise ValueError(
                "expected --timestamp, --log-entry, --timestamp-request or --model-signature with --attach"
            )
        if (out is None) == bool(responses or entries):
            raise ValueError("expected --out with --timestamp or --log-entry, and not without them")
    elif responses or entries:
        raise ValueError(
            "expected --attach with --timestamp and --log-entry: evidence is added to an existing commitment"
        )
    elif registry is not None and (model is not None or key_file is not None or out is None):
        raise ValueError("expected --out, and neither MODEL nor --key, with --registry")
    elif registry is None and (model is None or key_file is None or out is None):
        raise ValueError("expected MODEL, --key and --out, or --registry and --out, or --attach")
    elif (signing_key is None) == (new_signing_key is None):
        raise ValueError("expected either --signing-key or, the first time, --new-signing-key")
    sig_file = signature[1] if signature is not None else None
    with Outputs([path for path in (out, new_signing_key, request, sig_file) if path is not None]) as outputs:
        commitment: Signed
        if attach is not None:
            commitment = _attached(attach, responses, entries)
        else:
            signer = _signer(signing_key)
            if registry is not None:
                commitment = _of_log(registry, signer, statement or "")
            else:
                assert model is not None
                assert key_file is not None
                load = partial(_load, model, weights, seed, code)
                commitment = _made(report, key_file, signer, statement or "", load)
            if new_signing_key is not None:
                signer.save(outputs.place(new_signing_key))
        if out is not None:
            commitment.save(outputs.place(out))
        if request is not None:
            write_file(outputs.place(request), commitment.timestamp_request())
        if signature is not None and ec_key is not None:
            from stainlock.commitments.attestation import attestation
            from stainlock.commitments.commitment import Commitment

            if not isinstance(commitment, Commitment):
                raise ValueError("expected a commitment to a model with --model-signature, not to a registry's log")
            write_file(outputs.place(signature[1]), attestation(signature[0], commitment, ec_key).encode())
        outputs.commit()
    facts = {
        "digest": commitment.digest, "signer": commitment.public_key, "created": commitment.created,
        "statement": commitment.statement, "timestamps": len(commitment.timestamps),
        "log_entries": len(commitment.log_entries), "out": str(out) if out else None,
        "timestamp_request": str(request) if request else None,
        "new_signing_key": str(new_signing_key) if new_signing_key else None,
        "model_signature": str(sig_file) if sig_file else None,
    }  # fmt: skip
    report.result(facts, f"commitment {commitment.digest}, signed by {commitment.public_key}")
    report.remark(*(f"wrote {path}" for path in (out, new_signing_key, request, sig_file) if path))
    if not commitment.timestamps:
        report.remark("nothing shows its date yet: have it timestamped (--timestamp-request, then --attach)")


def _signer(path: Path | None) -> Signer:
    from stainlock.commitments.signing import Signer

    return Signer.new() if path is None else Signer.load(path)


def _made(
    report: Report,
    key_file: Path,
    signer: Signer,
    statement: str,
    load: Callable[[], Target | dict[str, Tensor]],
) -> Commitment:
    from stainlock.commitments.commitment import commit
    from stainlock.key import Key

    key = Key.load(key_file)
    if key.seed < _GUESSABLE:
        report.remark("note: this key was made with --seed: anyone who guesses the seed can open the commitment")
    return commit(load(), key, signer, statement=statement)


def _load(model: str, weights: str | None, seed: int | None, code: Code) -> Target | dict[str, Tensor]:
    """For a bundle only its weights, which are enough if they show the stain."""
    from stainlock.models.bundle import Bundle

    if Path(model).is_dir() and weights is None and code == NO_CODE:
        return Bundle.read(model).weights
    return load_model(model, weights, seed, code)


def _of_log(registry: Path, signer: Signer, statement: str) -> Signed:
    from stainlock.clients.ledger import Ledger

    with Ledger(registry) as clients:
        return clients.commit_log(signer, statement=statement)


def _attached(path: Path, responses: tuple[Path, ...], entries: tuple[Path, ...]) -> Signed:
    from stainlock.commitments.commitment import Commitment
    from stainlock.commitments.log_head import LogCommitment
    from stainlock.storage.records import read_json

    facts = read_json(path, "commitment")
    of_log = isinstance(facts, dict) and facts.get("format") == LogCommitment.FORMAT
    commitment: Signed = LogCommitment.load(path) if of_log else Commitment.load(path)
    for file in responses:
        commitment = commitment.with_timestamp(file.read_bytes(), str(file))
    for file in entries:
        commitment = commitment.with_log_entry(read_json(file, "log's entry"), str(file))
    return commitment
